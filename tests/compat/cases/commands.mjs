// Commands and terminals, as a user of the JavaScript client calls them.
import assert from 'node:assert/strict'
import { e2b, rejects, sandbox, until } from './shared.mjs'

const text = (data) => new TextDecoder().decode(data)

export async function test_run_gives_output_and_exit_code() {
  const box = await sandbox()
  const done = await box.commands.run('echo out; echo err >&2')
  assert.deepEqual([done.stdout, done.stderr, done.exitCode, done.error], ['out\n', 'err\n', 0, undefined])
}

export async function test_a_command_that_fails_is_raised_with_its_output() {
  const box = await sandbox()
  const error = await rejects(box.commands.run('echo partial; exit 3'), e2b.CommandExitError)
  assert.deepEqual([error.exitCode, error.stdout, error.error], [3, 'partial\n', 'exit status 3'])
}

export async function test_callbacks_get_pieces_as_they_come() {
  const box = await sandbox()
  let [out, err] = ['', '']
  await box.commands.run('echo 1; echo 2 >&2; sleep 0.2; echo 日本', {
    onStdout: (data) => (out += data),
    onStderr: (data) => (err += data),
  })
  assert.deepEqual([out, err], ['1\n日本\n', '2\n'])
}

export async function test_large_output_is_whole() {
  const box = await sandbox()
  const done = await box.commands.run("head -c 2000000 /dev/zero | tr '\\0' x")
  assert.equal(done.stdout, 'x'.repeat(2_000_000))
}

export async function test_environment_directory_and_user() {
  const box = await sandbox()
  const done = await box.commands.run('echo $FOO; pwd; whoami', { envs: { FOO: 'bar' }, cwd: '/tmp', user: 'root' })
  assert.equal(done.stdout, 'bar\n/tmp\nroot\n')
  await rejects(
    box.commands.run('pwd', { cwd: '/no/such/place' }),
    e2b.InvalidArgumentError,
    "cwd '/no/such/place' does not exist"
  )
  await rejects(
    box.commands.run('true', { user: 'nobody-here' }),
    e2b.AuthenticationError,
    "invalid username: 'nobody-here'"
  )
}

export async function test_a_command_in_the_background_is_listed_and_killed() {
  const box = await sandbox()
  const handle = await box.commands.run('sleep 300', { background: true, envs: { A: 'b' } })
  const listed = (await box.commands.list()).find((process) => process.pid === handle.pid)
  assert.deepEqual([listed.cmd, listed.args, listed.envs], ['/bin/bash', ['-l', '-c', 'sleep 300'], { A: 'b' }])
  assert.equal(await handle.kill(), true)
  const error = await rejects(handle.wait(), e2b.CommandExitError)
  assert.deepEqual([error.exitCode, error.error], [-1, 'signal: killed'])
  assert.equal(await box.commands.kill(handle.pid), false)
}

export async function test_a_pid_that_is_not_there_is_told() {
  const box = await sandbox()
  assert.equal(await box.commands.kill(99_999), false)
  await rejects(box.commands.connect(99_999), e2b.NotFoundError, 'process with pid 99999 not found')
  await rejects(box.commands.sendStdin(99_999, 'x'), e2b.NotFoundError, 'process with pid 99999 not found')
}

export async function test_connecting_again_gives_what_comes_from_then_on() {
  const box = await sandbox()
  let seen = ''
  const handle = await box.commands.run('echo before; read line; echo got $line', {
    background: true,
    stdin: true,
    timeoutMs: 0,
    onStdout: (data) => (seen += data),
  })
  await until(() => seen === 'before\n')
  await handle.disconnect()
  const again = await box.commands.connect(handle.pid, { timeoutMs: 0 })
  const other = await box.commands.connect(handle.pid, { timeoutMs: 0 })
  await box.commands.sendStdin(handle.pid, 'it\n')
  assert.equal((await again.wait()).stdout, 'got it\n')
  assert.equal((await other.wait()).stdout, 'got it\n')
}

export async function test_stdin_is_sent_and_closed() {
  const box = await sandbox()
  const handle = await box.commands.run('cat', { background: true, stdin: true, timeoutMs: 0 })
  await box.commands.sendStdin(handle.pid, 'one\n')
  await box.commands.closeStdin(handle.pid)
  assert.equal((await handle.wait()).stdout, 'one\n')
}

export async function test_the_deadline_ends_the_command() {
  const box = await sandbox()
  for (const seconds of [1.5, 6, 20]) {
    const overdue = box.commands.run('echo $$ > /tmp/overdue; exec sleep 300', { timeoutMs: seconds * 1000 })
    await rejects(overdue, e2b.TimeoutError)
    if (await box.files.exists('/tmp/overdue')) break
  }
  const pid = (await box.files.read('/tmp/overdue')).trim()
  const look = `kill -0 ${pid} 2>/dev/null && echo there || echo gone`
  await until(async () => (await box.commands.run(look)).stdout === 'gone\n')
}

// ---------------------------------------------------------------------------------------------------------- terminals

export async function test_a_terminal_is_used_resized_connected_to_and_left() {
  const box = await sandbox()
  let got = ''
  const handle = await box.pty.create({
    cols: 80,
    rows: 24,
    cwd: '/tmp',
    envs: { FOO: 'bar' },
    onData: (data) => (got += text(data)),
  })
  const type = (line) => box.pty.sendInput(handle.pid, new TextEncoder().encode(line))
  await type('echo $FOO-$TERM; pwd; stty size\n')
  await until(() => got.includes('bar-xterm-256color\r\n/tmp\r\n24 80\r\n'))
  await box.pty.resize(handle.pid, { cols: 100, rows: 30 })
  let more = ''
  const again = await box.pty.connect(handle.pid, { onData: (data) => (more += text(data)) })
  await type('stty size\n')
  await until(() => more.includes('30 100\r\n'))
  await type('exit 5\n')
  assert.equal((await rejects(again.wait(), e2b.CommandExitError)).exitCode, 5)
  assert.equal(await box.pty.kill(handle.pid), false)
}
