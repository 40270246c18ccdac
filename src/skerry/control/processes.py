"""Commands and terminals in a sandbox."""

from collections.abc import AsyncIterator, Callable
from typing import Any

from skerry.audit import Outcome
from skerry.control.access import Access, Entry
from skerry.control.checks import check_process, check_pty, signal_name
from skerry.control.delivery import Delivery
from skerry.control.live import Live
from skerry.control.principal import Principal, Scope
from skerry.control.recorder import NAMES_KEPT, Recorder, clipped_argv, text
from skerry.control.redaction import clean_process
from skerry.control.streams import HeldProcess
from skerry.core import ids
from skerry.core.errors import NotFound, SkerryError
from skerry.core.limits import check_range, refuse
from skerry.core.models import NO_SECRETS, Bindings, Exited, ExitStatus, ProcessInfo, ProcessSpec, PtySize
from skerry.core.secrets import check_bindings
from skerry.node.contract import Guest, ProcessStream

OFFSET_MAX = 2**63 - 1


class Commands:
    """The audit of commands: each start once, each end once, whoever is the first to see it."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def started(self, live: Live, process_id: str, actor: str) -> None:
        live.commands[process_id] = actor

    async def finished(self, live: Live, process_id: str, status: ExitStatus) -> None:
        actor = live.commands.pop(process_id, None)
        if actor is None:
            return
        await self._recorder.write(
            self._recorder.on(
                live.record,
                "command.finished",
                Outcome.OK,
                actor=actor,
                process_id=process_id,
                reason=status.reason.value,
                exit_code=status.exit_code,
                signal=status.signal,
                duration_ms=status.duration_ms,
            )
        )

    async def look(self, live: Live, guest: Guest) -> list[ProcessInfo]:
        """The guest's list, and what it shows of ends that nobody watched."""
        pending = set(live.commands)
        found = await guest.processes()
        for process in found:
            if process.exit is not None:
                await self.finished(live, process.process_id, process.exit)
        found = [clean_process(process, live.redactor) for process in found]
        for process_id in pending - {process.process_id for process in found}:
            # Ended and forgotten, or never started: the guest knows nothing of it any more.
            actor = live.commands.pop(process_id, None)
            if actor is not None:
                await self._recorder.write(
                    self._recorder.on(
                        live.record, "command.finished", Outcome.UNKNOWN, actor=actor, process_id=process_id
                    )
                )
        return found


class Processes:
    """`ref` is a process id (`pr…`) or a pid of the guest in decimal digits."""

    def __init__(self, access: Access, recorder: Recorder, commands: Commands, delivery: Delivery) -> None:
        self._access = access
        self._recorder = recorder
        self._commands = commands
        self._delivery = delivery

    async def start(
        self, principal: Principal, sandbox_id: str, spec: ProcessSpec, secrets: Bindings = NO_SECRETS
    ) -> ProcessStream:
        """Start it and attach. The sandbox is active until the stream ends or is closed, and while the process runs.

        It gets the secrets that are bound to its sandbox, and those bound here, which takes the scope `secrets:use`.
        Raises what `contract.Guest.start` and `Delivery.deliver` do; InvalidRequest for a spec that is wrong as it
        stands.
        """
        detail = _said(spec)
        async with self._recorder.act(principal, "command.started", sandbox_id, **detail) as act:
            if secrets:
                principal.require(Scope.SECRETS_USE)
            entry = await self._access.enter(principal, sandbox_id)
            try:
                spec = check_process(spec)
                if secrets or entry.live.record.spec.secrets:
                    refuse(list(check_bindings(secrets, spec.env)))
                    spec, act.detail["secrets"] = await self._delivery.deliver(entry.live, spec, secrets)
                if entry.live.redactor is not None:
                    act.detail |= _said(spec, entry.live.redactor.text)
                async with self._access.answered(entry.live):
                    stream = await entry.guest.start(spec)
            except BaseException as error:
                if isinstance(error, SkerryError) and error.retry != "unknown":
                    self._access.leave(entry.live)
                else:  # it may run
                    self._commands.started(entry.live, spec.process_id, principal.key_id)
                    self._access.leave(entry.live)
                raise
            act.detail |= {"pid": stream.process.pid}
            self._commands.started(entry.live, spec.process_id, principal.key_id)
        return self._held(stream, entry.live)

    def _held(self, stream: ProcessStream, live: Live, *, follow: bool = True) -> ProcessStream:
        process_id = stream.process.process_id

        async def exited(event: Exited) -> None:
            await self._commands.finished(live, process_id, event.status)

        return HeldProcess(stream, live, self._access, exited, follow=follow)

    async def attach(
        self,
        principal: Principal,
        sandbox_id: str,
        ref: str,
        *,
        stdout_offset: int = 0,
        stderr_offset: int = 0,
        follow: bool = True,
    ) -> ProcessStream:
        """Its output from these offsets on, and its exit. NotFound `process_not_found`.

        `follow` False: what is there now; ends without `Exited` where the process runs on.
        """
        refuse(
            [
                *check_range("stdout_offset", stdout_offset, 0, OFFSET_MAX),
                *check_range("stderr_offset", stderr_offset, 0, OFFSET_MAX),
            ]
        )
        entry = await self._access.enter(principal, sandbox_id)
        try:
            async with self._access.answered(entry.live):
                process_id = await self._resolve(entry, ref)
                redactor = entry.live.redactor
                stream = await entry.guest.attach(
                    process_id,
                    stdout_offset=stdout_offset,
                    stderr_offset=stderr_offset,
                    before=0 if redactor is None else redactor.longest,  # they may point into a secret
                    follow=follow,
                )
        except BaseException:
            self._access.leave(entry.live)
            raise
        return self._held(stream, entry.live, follow=follow)

    async def list(self, principal: Principal, sandbox_id: str) -> list[ProcessInfo]:
        """Running ones, and those that the guest remembers."""
        async with self._access.use(principal, sandbox_id) as entry:
            return await self._commands.look(entry.live, entry.guest)

    async def get(self, principal: Principal, sandbox_id: str, ref: str) -> ProcessInfo:
        async with self._access.use(principal, sandbox_id) as entry:
            return await self._find(entry, ref)

    async def signal(self, principal: Principal, sandbox_id: str, ref: str, signal: str) -> None:
        """To its process group. Conflict `process_exited` if it is over."""
        async with self._recorder.act(principal, "command.signalled", sandbox_id, ref=text(ref, 40)) as act:
            name = signal_name(signal)
            act.detail["signal"] = name
            async with self._access.use(principal, sandbox_id) as entry:
                await entry.guest.signal(await self._resolve(entry, ref), name)

    async def kill(self, principal: Principal, sandbox_id: str, ref: str) -> bool:
        """SIGKILL to its whole tree. False if it was over already."""
        async with (
            self._recorder.act(principal, "command.killed", sandbox_id, ref=text(ref, 40)) as act,
            self._access.use(principal, sandbox_id) as entry,
        ):
            killed = await entry.guest.kill_process(await self._resolve(entry, ref))
            act.detail["killed"] = killed
            return killed

    async def write_stdin(self, principal: Principal, sandbox_id: str, ref: str, data: AsyncIterator[bytes]) -> int:
        """Feed it; returns how many bytes its pipe took. Takes as long as the process takes to read."""
        entry = await self._access.enter(principal, sandbox_id)
        try:
            async with self._access.answered(entry.live):
                process_id = await self._resolve(entry, ref)
            async with self._access.explained(entry.live):
                return await entry.guest.write_stdin(process_id, data)
        finally:
            self._access.leave(entry.live)

    async def close_stdin(self, principal: Principal, sandbox_id: str, ref: str) -> None:
        async with self._access.use(principal, sandbox_id) as entry:
            await entry.guest.close_stdin(await self._resolve(entry, ref))

    async def resize(self, principal: Principal, sandbox_id: str, ref: str, size: PtySize) -> None:
        refuse(check_pty(size))
        async with self._access.use(principal, sandbox_id) as entry:
            await entry.guest.resize_pty(await self._resolve(entry, ref), size)

    async def _resolve(self, entry: Entry, ref: str) -> str:
        """A process id as it is (the guest knows whether there is one); a pid is looked up."""
        if ids.is_id(ref, ids.PROCESS):
            return ref
        return (await self._find(entry, ref)).process_id

    async def _find(self, entry: Entry, ref: str) -> ProcessInfo:
        """A pid may have been used twice: the latest counts."""
        found = await self._commands.look(entry.live, entry.guest)
        fit = [p for p in found if ref in {p.process_id, str(p.pid)}]
        if not fit:
            raise NotFound(f"there is no process {text(ref, 40)}", code="process_not_found", process=text(ref, 40))
        return max(fit, key=lambda process: process.started_at_ms)


def _said(spec: ProcessSpec, clean: Callable[[str], str] = str) -> dict[str, Any]:
    """What is kept of a command: what ran and where; of variables the names only. `clean` comes before the cut."""
    said: dict[str, Any] = {"process_id": text(spec.process_id, 40)}
    if spec.argv is not None:
        said["argv"] = clipped_argv(tuple(map(clean, spec.argv)))
    if spec.shell is not None:
        said["shell"] = text(clean(spec.shell))
    if spec.cwd is not None:
        said["cwd"] = text(clean(spec.cwd))
    if spec.user is not None:
        said["user"] = text(spec.user, 80)
    if spec.env:
        said["env_names"] = [text(name, 80) for name in sorted(spec.env)[:NAMES_KEPT]]
    if spec.pty is not None:
        said["pty"] = True
    return said
