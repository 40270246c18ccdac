"""Handing secrets to commands: opened at the moment of a start, and remembered as long as the sandbox may say them.

Whoever starts a command in a sandbox that secrets were bound to when it was made has the use of them; binding others
takes the scope `secrets:use`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from skerry.control.live import Live
from skerry.control.secrets import secret_not_found
from skerry.control.service import Context
from skerry.control.vault import Vault
from skerry.core.errors import InternalError
from skerry.core.models import Bindings, ProcessSpec
from skerry.core.secrets import laid_over, parse_reference
from skerry.store import Sealed, Tx


class Delivery:
    def __init__(self, context: Context, vault: Vault) -> None:
        self._store = context.store
        self._vault = vault

    async def check(self, tx: Tx, project_id: str, bindings: Bindings) -> None:
        """Raises NotFound `secret_not_found` unless each is there now."""
        await self._find(tx, project_id, bindings)

    async def deliver(self, live: Live, spec: ProcessSpec, own: Bindings) -> tuple[ProcessSpec, dict[str, str]]:
        """The spec as the guest is to get it, and what that holds: variable → NAME@VERSION. `own`: the command's.

        What is handed over is known to the sandbox's redactor, and noted in the database, before this returns. Raises
        NotFound `secret_not_found`, Conflict `tenant_key_destroyed`, InternalError `root_key_wrong` or
        `secret_damaged`.
        """
        bound = laid_over(live.record.spec.secrets, own, spec.env)
        if not bound:
            return spec, {}
        project_id = live.record.project_id
        async with self._store.read() as tx:
            found = await self._find(tx, project_id, bound)
        if any(_key(sealed) not in live.secrets for sealed in found.values()):
            async with self._store.write() as tx:
                found = await self._find(tx, project_id, bound)  # none of them is forgotten from here on
                await tx.secrets.use(live.id, {_key(sealed) for sealed in found.values()})
                live.learn(await self._opened(tx, live, found.values()))
        values = {wanted: live.secrets[_key(sealed)].decode() for wanted, sealed in found.items()}
        said = {
            variable: f"{found[wanted].name}@{found[wanted].version}"
            for variable, wanted in (*bound.env.items(), *bound.files.items())
        }
        env = {variable: values[wanted] for variable, wanted in bound.env.items()}
        files = {variable: values[wanted] for variable, wanted in bound.files.items()}
        return replace(spec, secret_env=env, secret_files=files), said

    async def value(self, project_id: str, reference: str) -> bytes:
        """What a reference stands for now. Raises as `deliver` does."""
        async with self._store.read() as tx:
            (sealed,) = (await self._find(tx, project_id, Bindings({"value": reference}))).values()
            return await self._vault.open(tx, sealed)

    async def recall(self, lives: Iterable[Live]) -> None:
        """Learn anew what these were ever given, theirs or what they were made of, so that it is taken out of what they
        say. Raises InternalError `secret_damaged` once it has learned all others."""
        by_id = {live.id: live for live in lives}
        damage: InternalError | None = None
        async with self._store.read() as tx:
            for holder_id, sealed in await tx.secrets.used(list(by_id)):
                live = by_id[holder_id]
                try:
                    live.learn(await self._opened(tx, live, [sealed]))
                except InternalError as error:
                    damage = error
        if damage is not None:
            raise damage

    async def _find(self, tx: Tx, project_id: str, bindings: Bindings) -> dict[str, Sealed]:
        """Each reference that is bound, and the version that it stands for now."""
        found: dict[str, Sealed] = {}
        for wanted in sorted({*bindings.env.values(), *bindings.files.values()}):
            sealed = await tx.secrets.sealed(project_id, *parse_reference(wanted))
            if sealed is None:
                raise secret_not_found(wanted)
            found[wanted] = sealed
        return found

    async def _opened(self, tx: Tx, live: Live, wanted: Iterable[Sealed]) -> Mapping[tuple[str, int], bytes]:
        """Those that it has not been given before."""
        new = {_key(sealed): sealed for sealed in wanted if _key(sealed) not in live.secrets}
        return {key: await self._vault.open(tx, sealed) for key, sealed in new.items()}


def _key(sealed: Sealed) -> tuple[str, int]:
    return sealed.secret_id, sealed.version
