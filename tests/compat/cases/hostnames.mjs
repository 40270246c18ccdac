// By names under TLS, as a user of the JavaScript client whose environment holds a domain and no URL.
import assert from 'node:assert/strict'
import { e2b, sandbox, until } from './shared.mjs'

const { E2B_DOMAIN: domain } = process.env

// Answers GET with the path, and an upgrade with one WebSocket message before it closes.
const SERVER = `
const { createHash } = require('crypto')
const server = require('http').createServer((request, answer) => answer.end('at ' + request.url))
server.on('upgrade', (request, socket) => {
  const key = request.headers['sec-websocket-key'] + '258EAFA5-E914-47DA-95CA-C5AB0DC85B11'
  const accept = createHash('sha1').update(key).digest('base64')
  socket.write('HTTP/1.1 101 Switching Protocols\\r\\nUpgrade: websocket\\r\\nConnection: Upgrade\\r\\n' +
    'Sec-WebSocket-Accept: ' + accept + '\\r\\n\\r\\n')
  socket.write(Buffer.concat([Buffer.from([0x81, 5]), Buffer.from('hello'), Buffer.from([0x88, 2, 0x03, 0xe8])]))
})
server.listen(8002)
`

export async function test_every_name_is_of_the_domain_and_no_url_was_given() {
  assert.equal(process.env.E2B_API_URL ?? process.env.E2B_SANDBOX_URL ?? process.env.E2B_DEBUG, undefined)
  const box = await sandbox()
  assert.equal(box.getHost(8000), `8000-${box.sandboxId}.${domain}`)
  assert.equal((await e2b.Sandbox.getInfo(box.sandboxId)).sandboxId, box.sandboxId)
  assert.ok((await e2b.Sandbox.list().nextItems()).some((one) => one.sandboxId === box.sandboxId))
}

export async function test_commands_and_files() {
  const box = await sandbox()
  const done = await box.commands.run('echo out; echo err >&2')
  assert.deepEqual([done.stdout, done.stderr], ['out\n', 'err\n'])
  const blob = Buffer.alloc(10 << 20, '0123456789abcdef')
  await box.files.write('blob', new Blob([blob]))
  assert.ok(Buffer.from(await box.files.read('blob', { format: 'bytes' })).equals(blob))
}

export async function test_a_stream_is_left_and_found_again() {
  const box = await sandbox()
  const handle = await box.commands.run('read line; echo got $line', { background: true, stdin: true, timeoutMs: 0 })
  await handle.disconnect()
  const again = await box.commands.connect(handle.pid, { timeoutMs: 0 })
  await box.commands.sendStdin(handle.pid, 'it\n')
  assert.equal((await again.wait()).stdout, 'got it\n')
}

export async function test_a_watch_is_a_stream() {
  const [box, seen] = [await sandbox(), []]
  await box.files.makeDir('watched')
  const watch = await box.files.watchDir('watched', (event) => seen.push(event.name))
  await box.files.write('watched/new', 'x')
  await until(() => seen.includes('new'))
  await watch.stop()
}

export async function test_signed_urls_name_the_sandbox() {
  const box = await sandbox()
  const up = await box.uploadUrl('signed.txt', { useSignatureExpiration: 60 })
  assert.ok(up.startsWith(`https://49983-${box.sandboxId}.${domain}/files?`), up)
  const form = new FormData()
  form.append('file', new Blob(['by URL']), 'signed.txt')
  assert.equal((await fetch(up, { method: 'POST', body: form })).status, 200)
  const down = await box.downloadUrl('signed.txt', { useSignatureExpiration: 60 })
  assert.equal(await (await fetch(down)).text(), 'by URL')
}

// The first message of a WebSocket.
function greeting(host) {
  const { WebSocket } = globalThis.compat.client('undici')
  const socket = new WebSocket(`wss://${host}/`)
  return new Promise((resolve, reject) => {
    socket.onmessage = (message) => resolve(message.data)
    socket.onerror = (event) => reject(event.error ?? new Error('it was not opened'))
  })
}

export async function test_a_server_in_the_sandbox() {
  const box = await sandbox()
  await box.files.write('server.js', SERVER)
  await box.commands.run('node server.js', { background: true, timeoutMs: 0 })
  const host = box.getHost(8002)
  await until(async () => (await fetch(`https://${host}/`)).status === 200)
  assert.equal(await (await fetch(`https://${host}/a%2Fb?c=d`)).text(), 'at /a%2Fb?c=d')
  assert.equal(await greeting(host), 'hello')
  const closed = await fetch(`https://${box.getHost(8003)}/`)
  assert.equal(closed.status, 502)
  assert.equal((await closed.json()).message, 'The sandbox is running but port is not open')
}

export async function test_a_websocket_wakes_what_rests() {
  const box = await e2b.Sandbox.create({ timeoutMs: 300_000, lifecycle: { onTimeout: 'pause', autoResume: true } })
  try {
    await box.files.write('server.js', SERVER)
    await box.commands.run('node server.js', { background: true, timeoutMs: 0 })
    const host = box.getHost(8002)
    await until(async () => (await fetch(`https://${host}/`)).status === 200)
    assert.equal(await (box.pause ?? box.betaPause).call(box), true)
    assert.equal((await e2b.Sandbox.getInfo(box.sandboxId)).state, 'paused')
    assert.equal(await greeting(host), 'hello')
    assert.equal((await e2b.Sandbox.getInfo(box.sandboxId)).state, 'running')
  } finally {
    await box.kill()
  }
}

export async function test_one_that_is_over_is_not_running() {
  const box = await e2b.Sandbox.create({ timeoutMs: 300_000 })
  assert.equal(await box.isRunning(), true)
  await box.kill()
  assert.equal(await box.isRunning(), false)
}
