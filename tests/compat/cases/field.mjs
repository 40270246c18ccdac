// What users of such clients have reported of products like this one, by the JavaScript client: BUG-… in docs/CASES.md.
import assert from 'node:assert/strict'
import { e2b, rejects, sandbox } from './shared.mjs'

const { Sandbox, NotFoundError, InvalidArgumentError, AuthenticationError, CommandExitError, TimeoutError } = e2b
const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms))
const failure = (promise) => promise.then((done) => assert.fail(`it went well: ${done}`), (error) => error)

export async function test_output_of_every_size_is_whole() { // BUG-01
  const box = await sandbox()
  for (const size of [0, 1, 4095, 4096, 4097, 65_535, 65_536, 65_537, 1_048_577]) {
    const done = await box.commands.run(`head -c ${size} /dev/zero | tr '\\0' x`)
    assert.equal(done.stdout, 'x'.repeat(size))
  }
}

export async function test_bytes_that_are_no_text_and_characters_cut_in_two() { // BUG-03
  const box = await sandbox()
  assert.equal((await box.commands.run("printf '\\xff\\xfeok\\n'")).stdout, '\ufffd\ufffdok\n')
  let heard = ''
  const cut = 'for b in e2 89 a4 0a; do printf "\\x$b"; sleep 0.2; done'
  assert.equal((await box.commands.run(cut, { onStdout: (text) => (heard += text) })).stdout, '\u2264\n')
  assert.equal(heard, '\u2264\n')
  const smiles = await box.commands.run('python3 -c \'print("\\U0001F600" * 100001, end="")\'')
  assert.equal(smiles.stdout, '\u{1f600}'.repeat(100_001))
}

export async function test_how_it_ended_is_told() { // BUG-08
  const box = await sandbox()
  for (const [text, code, said] of [['kill -9 $$', -1, 'signal: killed'], ['exit 137', 137, 'exit status 137']]) {
    const error = await rejects(box.commands.run(text), CommandExitError)
    assert.deepEqual([error.exitCode, error.error], [code, said])
  }
  const handle = await box.commands.run('sleep 273 & sleep 273 & wait', { background: true })
  assert.equal(await handle.kill(), true)
  assert.equal(await handle.kill(), false)
  assert.equal(await box.commands.kill(99_999), false)
}

export async function test_what_cannot_start_says_why() { // BUG-09
  const box = await sandbox()
  await rejects(box.commands.run('true', { cwd: '/does/not/exist' }), InvalidArgumentError, "cwd '/does/not/exist' does not exist")
  await rejects(box.commands.run('true', { user: 'nosuch' }), AuthenticationError, "invalid username: 'nosuch'")
  await rejects(box.commands.run('true', { envs: { 'A=B': 'x' } }), InvalidArgumentError, 'A=B')
}

export async function test_files_of_every_form_and_none() { // BUG-20
  const box = await sandbox()
  await box.files.write('empty', '')
  assert.equal(await box.files.read('empty'), '')
  assert.equal((await box.files.read('empty', { format: 'bytes' })).length, 0)
  assert.equal((await box.files.read('empty', { format: 'blob' })).size, 0)
  assert.equal(await new Response(await box.files.read('empty', { format: 'stream' })).text(), '')
  const blob = new Uint8Array(10_000_000).map((_, n) => n * 7)
  await box.files.write('blob', blob.buffer)
  assert.equal(Buffer.compare(Buffer.from(await box.files.read('blob', { format: 'bytes' })), Buffer.from(blob)), 0)
}

export async function test_a_request_that_is_given_up_is_over() { // BUG-39
  const box = await sandbox()
  const gone = await failure(box.commands.run('sleep 274', { signal: AbortSignal.timeout(1000) }))
  assert.ok(gone, String(gone))
  assert.equal((await box.commands.run('echo next')).stdout, 'next\n')
  const mark = `field-${Date.now()}`
  await failure(Sandbox.create({ metadata: { mark }, signal: AbortSignal.timeout(5) }))
  await wait(3000)
  assert.deepEqual(await Sandbox.list({ query: { metadata: { mark } } }).nextItems(), [])
}

export async function test_a_kill_ends_all_that_is_in_flight() { // BUG-40
  const box = await Sandbox.create({ timeoutMs: 600_000 })
  const command = await box.commands.run('exec sleep 600', { background: true, timeoutMs: 0 })
  const terminal = await box.pty.create({ cols: 80, rows: 24, onData: () => {}, timeoutMs: 0 })
  await box.commands.run('truncate -s 4G big')
  let over
  const watched = new Promise((resolve) => (over = resolve))
  await box.files.watchDir('.', () => {}, { timeoutMs: 0, onExit: over })
  const download = async () => {
    for await (const _ of await box.files.read('big', { format: 'stream' })) await wait(10)
  }
  const calls = { command: failure(command.wait()), terminal: failure(terminal.wait()), download: failure(download()), watched }
  await wait(500)
  assert.equal(await box.kill(), true)
  for (const [name, call] of Object.entries(calls)) {
    const error = await Promise.race([call, wait(30_000).then(() => assert.fail(`${name} goes on`))])
    assert.ok(error instanceof Error, name)
    if (name !== 'download') assert.match(error.message, /was killed or reached its end of life/, name)
  }
  for (const call of [box.files.read('x'), box.files.list('/'), box.files.write('x', '')]) {
    await rejects(call, TimeoutError, 'The sandbox was not found')
  }
  await rejects(box.commands.run('true'), NotFoundError, 'not running anymore')
  assert.equal(await box.isRunning(), false)
  assert.equal(await box.kill(), false)
}

export async function test_many_commands_at_once_all_answer() {
  const box = await sandbox()
  const run = (_, n) => box.commands.run(`echo ${n}`, { timeoutMs: 110_000 })
  const done = await Promise.all(Array.from({ length: 60 }, run))
  assert.deepEqual(done.map(({ stdout }) => stdout), Array.from({ length: 60 }, (_, n) => `${n}\n`))
}
