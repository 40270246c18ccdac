// Every public method and option of the JavaScript client, as it declares them: as surface.py does for Python's.
import assert from 'node:assert/strict'
import { readFileSync } from 'node:fs'
import http from 'node:http'
import { connect } from 'node:net'
import { Declarations } from './declarations.mjs'

const { client, environment, version } = globalThis.compat
const e2b = client('e2b')
const table = JSON.parse(readFileSync(process.env.SKERRY_COMPAT_TABLE, 'utf8'))
const declared = new Declarations(`${environment}/node_modules/e2b/dist/index.d.ts`)
const classes = {
  Sandbox: 'Sandbox', files: 'Filesystem', commands: 'Commands', pty: 'Pty', git: 'Git', handle: 'CommandHandle',
  watch: 'WatchHandle', pages: 'SandboxPaginator', Template: 'TemplateBase', Volume: 'Volume', Secret: 'Secret',
}
const isOld = version === 'js-2.45'
const everywhere = 'any call'
const connection = new Set([...declared.fields('ConnectionOpts').keys()])
const used = new Set()
const mark = `surface-${Date.now()}`
const at = { ...e2b }

// The tables have Python's spelling, and seconds.
const snake = (name) => name.replace(/(?<=[a-z])(?=[A-Z])/g, '_').toLowerCase().replace(/_ms$/, '')
const spelled = (method) => method.replace(/\.(\w+)$/, (_, name) => `.${snake(name)}`)

const known = (method) => {
  const [where, name] = method.split('.')
  return declared.methods(classes[where]).get(name) ?? new Map()
}

// Call a method with what this generation has of the options; `given` come before them.
async function call(method, given = [], options) {
  const [where, name] = method.split('.')
  if (!at[where][name]) return undefined
  const taken = Object.entries(options ?? {}).filter(([key, value]) => value !== undefined && known(method).has(key))
  used.add(spelled(method))
  for (const [key, value] of taken) {
    used.add(connection.has(key) ? `${everywhere} ${snake(key)}` : `${spelled(method)} ${snake(key)}`)
    if (value?.constructor === Object) for (const part of Object.keys(value)) used.add(`${spelled(method)} ${snake(key)}.${snake(part)}`)
  }
  return at[where][name](...given, ...(options ? [Object.fromEntries(taken)] : []))
}

function said(method, option) {
  for (const name of [method, `${method.split('.')[0]}.*`]) {
    const options = table[name] ?? {}
    const found = options[option] ?? options[option.split('.').at(-1)]
    if (found) return found
    if (option && options[''] && options[''].every((verdict) => verdict === 'no')) return options['']
  }
  return []
}

function* missing() {
  for (const [where, kind] of Object.entries(classes)) {
    for (const [name, options] of declared.methods(kind)) {
      const method = spelled(`${where}.${name}`)
      yield* look(method, '')
      for (const [option, parts] of options) {
        if (connection.has(option)) continue
        yield* look(method, snake(option))
        if (said(method, snake(option)).some((verdict) => verdict !== 'no')) {
          for (const part of parts) yield* look(method, `${snake(option)}.${snake(part)}`)
        }
      }
    }
  }
  for (const option of connection) yield* look(everywhere, snake(option))
}

function* look(method, option) {
  const verdicts = said(method, option)
  if (!verdicts.length) yield `${method} ${option}: is not in the tables`
  else if (verdicts.some((one) => one !== 'no') && !used.has(`${method} ${option}`.trim())) {
    yield `${method} ${option}: is said to work (${verdicts}), and was not used`
  }
}

export async function test_all() {
  const box = await making()
  try {
    Object.assign(at, { Sandbox: box, files: box.files, commands: box.commands, pty: box.pty, git: box.git })
    await commands()
    await terminals()
    await files()
    await repositories()
    await lifecycle(box)
    assert.equal(await call('Template.exists', ['base']), true)
    assert.equal(await call('Template.aliasExists', ['base']), true)
    assert.deepEqual((await call('Template.getTags', ['base'])).map(({ tag }) => tag), ['default'])
  } finally {
    at.Sandbox = box
    assert.equal(await call('Sandbox.kill', [], {}), true)
  }
  assert.deepEqual([...new Set(missing())].sort(), [])
}

async function making() {
  if (isOld) used.add(`${everywhere} logger`) // with one, that generation takes no answer of Node 20's fetch for an answer
  const url = process.env.E2B_API_URL
  const box = await call('Sandbox.create', ['base'], {
    timeoutMs: 900_000, metadata: { walk: mark }, envs: { A: '1' }, secure: true, allowInternetAccess: false,
    sandboxUrl: url, logger: isOld ? undefined : console, template: 'base',
    network: { allowPublicTraffic: false, maskRequestHost: 'there.test:${PORT}', denyOut: ['0.0.0.0/0'], allowOut: [] },
    lifecycle: { onTimeout: 'pause', autoResume: false },
  })
  const heads = []
  const proxy = http.createServer((asked, answer) => {
    heads.push(asked.headers)
    asked.pipe(http.request(asked.url, { method: asked.method, headers: asked.headers }, (got) => {
      answer.writeHead(got.statusCode, got.headers)
      got.pipe(answer)
    }))
  })
  proxy.on('connect', (asked, socket) => {
    heads.push(asked.headers)
    const [host, port] = asked.url.split(':')
    const there = connect(Number(port), host, () => {
      socket.write('HTTP/1.1 200 OK\r\n\r\n')
      there.pipe(socket).pipe(there)
    })
  })
  await new Promise((resolve) => proxy.listen(0, '127.0.0.1', resolve))
  const running = await call('Sandbox.connect', [box.sandboxId], {
    apiKey: process.env.E2B_API_KEY, apiUrl: url, sandboxUrl: url, domain: 'elsewhere.test', debug: false, timeoutMs: 900_000,
    validateApiKey: true, headers: { 'X-A': '1' }, apiHeaders: { 'X-B': '2' }, retries: 1, requestTimeoutMs: 30_000,
    signal: AbortSignal.timeout(30_000), proxy: `http://127.0.0.1:${proxy.address().port}`,
    onResume: 'restore',
  })
  assert.equal(running.sandboxId, box.sandboxId)
  proxy.closeAllConnections()
  proxy.close()
  assert.ok(heads.length, 'nothing came by the proxy')
  const query = { metadata: { walk: mark }, state: ['running'], startedAfter: new Date(2000, 1), template: 'base' }
  await page('Sandbox.list', { query, order: 'asc', limit: 1 }, 'sandboxId', [box.sandboxId])
  assert.equal(at.pages.hasNext, false)
  return box
}

async function commands() {
  let heard = ''
  const hear = (text) => (heard += text)
  const done = await call('commands.run', ['echo $B; pwd; whoami; echo e >&2'], {
    background: false, cwd: '/tmp', user: 'root', envs: { B: '2' }, onStdout: hear, onStderr: hear, stdin: false,
    timeoutMs: 30_000,
  })
  assert.deepEqual([done.stdout, done.stderr, heard.length], ['2\n/tmp\nroot\n', 'e\n', 14])
  const handle = (at.handle = await call('commands.run', ['cat; exit 3'], { background: true, stdin: true }))
  assert.ok((await call('commands.list', [], {})).some(({ pid }) => pid === handle.pid))
  await call('commands.sendStdin', [handle.pid, 'one\n'], {})
  await call('handle.sendStdin', ['two\n'], {})
  await call('handle.closeStdin', [], {})
  await assert.rejects(call('handle.wait'), (error) => error.exitCode === 3 && error.stdout === 'one\ntwo\n')
  const sleeper = await call('commands.run', ['echo here; exec sleep 300'], { background: true, stdin: true })
  await call('commands.closeStdin', [sleeper.pid], {})
  at.handle = await call('commands.connect', [sleeper.pid], { onStdout: hear, onStderr: hear, timeoutMs: 60_000 })
  await call('handle.disconnect')
  assert.equal(await call('commands.kill', [sleeper.pid], {}), true)
  at.handle = await call('commands.run', ['sleep 300'], { background: true })
  assert.equal(await call('handle.kill'), true)
}

async function terminals() {
  let heard = ''
  const onData = (bytes) => (heard += Buffer.from(bytes).toString())
  const made = await call('pty.create', [], {
    cols: 80, rows: 24, onData, timeoutMs: 60_000, user: 'root', envs: { C: '3' }, cwd: '/tmp',
  })
  await call('pty.resize', [made.pid, { cols: 101, rows: 30 }], {})
  const again = await call('pty.connect', [made.pid], { onData, timeoutMs: 60_000 })
  await call('pty.sendInput', [made.pid, new TextEncoder().encode('echo $C $(stty size); exit\n')], {})
  await again.wait()
  assert.match(heard, /3 30 101/)
  const another = await call('pty.create', [], { cols: 80, rows: 24, onData })
  assert.equal(await call('pty.kill', [another.pid], {}), true)
}

async function files() {
  const user = 'root'
  await call('files.write', ['/tmp/w/a', 'text'], { user, gzip: true, useOctetStream: true, metadata: { k: 'v' } })
  await call('files.writeFiles', [[{ path: '/tmp/w/b', data: 'b' }]], { user, gzip: true, useOctetStream: true, metadata: { k: 'v' } })
  assert.equal(await call('files.read', ['/tmp/w/a'], { user, gzip: true, format: 'text' }), 'text')
  const stream = await call('files.read', ['/tmp/w/b'], { format: 'stream', streamIdleTimeoutMs: 30_000 })
  assert.equal(await new Response(stream).text(), 'b')
  assert.deepEqual((await call('files.list', ['/tmp/w'], { user, depth: 2 })).map(({ name }) => name), ['a', 'b'])
  assert.equal(await call('files.exists', ['/tmp/w/a'], { user }), true)
  assert.deepEqual((await call('files.getInfo', ['/tmp/w/a'], { user })).metadata, { k: 'v' })
  assert.equal(await call('files.makeDir', ['/tmp/w/d'], { user }), true)
  const seen = []
  let over
  const ended = new Promise((resolve) => (over = resolve))
  at.watch = await call('files.watchDir', ['/tmp/w', ({ name }) => seen.push(name)], {
    user, timeoutMs: 60_000, recursive: true, includeEntry: true, allowNetworkMounts: true, onExit: over,
  })
  await call('files.write', ['/tmp/w/d/new', 'x'], {})
  for (let n = 0; n < 300 && !seen.includes('d/new'); n++) await new Promise((resolve) => setTimeout(resolve, 100))
  assert.ok(seen.includes('d/new'), String(seen))
  await call('watch.stop')
  await ended
  assert.equal((await call('files.rename', ['/tmp/w/a', '/tmp/w/c'], { user })).name, 'c')
  await call('files.remove', ['/tmp/w'], { user })
  assert.match(await call('Sandbox.downloadUrl', ['a'], { user, useSignatureExpiration: 60 }), /\/files\?/)
  assert.match(await call('Sandbox.uploadUrl', ['a'], { user, useSignatureExpiration: 60 }), /\/files\?/)
}

const origin = 'http://127.0.0.1:8418/cgi-bin/git/origin.git'
const serve = `
mkdir -p srv/cgi-bin && cd srv && git init -q --bare -b main origin.git
git -C origin.git config http.receivepack true
printf '#!/bin/sh\\nexec git http-backend\\n' > cgi-bin/git && chmod +x cgi-bin/git
export GIT_PROJECT_ROOT=$PWD GIT_HTTP_EXPORT_ALL=1
nohup python3 -m http.server --cgi --bind 127.0.0.1 8418 > log 2>&1 &
for n in $(seq 100); do curl -sf http://127.0.0.1:8418/ > /dev/null && exit 0; sleep 0.1; done; cat log; exit 1`

async function repositories() {
  await call('commands.run', [serve], {})
  const how = { envs: { X: '1' }, user: 'user', cwd: '/home/user', timeoutMs: 60_000 }
  const who = { username: 'me', password: 'secret' }
  await call('git.configureUser', ['Me', 'me@boxes.test'], { ...how, scope: 'global' })
  await call('git.dangerouslyAuthenticate', [], { ...how, ...who, host: 'boxes.test', protocol: 'https' })
  await call('git.init', ['r'], { ...how, bare: false, initialBranch: 'main' })
  const here = { ...how, scope: 'local', path: 'r' }
  await call('git.setConfig', ['core.editor', 'true'], here)
  assert.equal(await call('git.getConfig', ['core.editor'], here), 'true')
  await call('git.configureUser', ['Me', 'me@boxes.test'], here)
  await call('git.remoteAdd', ['r', 'origin', origin], { ...how, fetch: false, overwrite: true })
  assert.equal(await call('git.remoteGet', ['r', 'origin'], how), origin)
  await call('files.write', ['r/a', '1\n'], {})
  await call('git.add', ['r'], { ...how, files: ['a'], all: false })
  await call('git.commit', ['r', 'one'], { ...how, authorName: 'A', authorEmail: 'a@boxes.test', allowEmpty: true })
  await call('git.push', ['r'], { ...how, ...who, remote: 'origin', branch: 'main', setUpstream: true })
  await call('git.clone', [origin], { ...how, ...who, path: 'c', branch: 'main', depth: 1, dangerouslyStoreCredentials: false })
  await call('git.pull', ['c'], { ...how, ...who, remote: 'origin', branch: 'main' })
  await call('git.createBranch', ['r', 'side'], how)
  await call('git.checkoutBranch', ['r', 'main'], how)
  assert.equal((await call('git.branches', ['r'], how)).currentBranch, 'main')
  await call('git.deleteBranch', ['r', 'side'], { ...how, force: true })
  await call('files.write', ['r/a', '2\n'], {})
  await call('git.reset', ['r'], { ...how, target: 'HEAD', paths: ['a'] })
  await call('git.reset', ['r'], { mode: 'soft' })
  await call('git.restore', ['r'], { ...how, paths: ['a'], staged: false, worktree: true, source: 'HEAD' })
  assert.equal((await call('git.status', ['r'], how)).isClean, true)
}

// One page of a list: these, and no others.
async function page(method, options, key, ids) {
  at.pages = await call(method, [], options)
  assert.deepEqual((await call('pages.nextItems', [], {})).map((one) => one[key]), ids)
}

async function lifecycle(box) {
  assert.equal(await call('Sandbox.isRunning', [], {}), true)
  assert.match(await call('Sandbox.getHost', [80]), new RegExp(`^80-${box.sandboxId}\\.`))
  assert.equal((await call('Sandbox.getInfo', [], {})).sandboxId, box.sandboxId)
  await call('Sandbox.setTimeout', [800_000], {})
  await call('Sandbox.updateNetwork', [{ denyOut: ['0.0.0.0/0'], allowInternetAccess: false }], {})
  assert.ok(Array.isArray(await call('Sandbox.getMetrics', [], { start: new Date(2000, 1), end: new Date(2100, 1) })))
  const name = `surface-${Date.now()}`
  const [tags, taken] = [['one', 'two'], []]
  for (const tag of tags) taken.unshift(await call('Sandbox.createSnapshot', [], { name: `${name}:${tag}`, mode: 'full' }))
  at.Sandbox = e2b.Sandbox
  assert.equal((await call('Sandbox.getFullInfo', [box.sandboxId], {})).sandboxId, box.sandboxId)
  const snapshots = { sandboxId: box.sandboxId, limit: 1 }
  await page('Sandbox.listSnapshots', snapshots, 'snapshotId', [taken[0].snapshotId])
  snapshots.nextToken = at.pages.nextToken
  await page('Sandbox.listSnapshots', snapshots, 'snapshotId', [taken[1].snapshotId])
  await page('Sandbox.listSnapshots', { name: `${name}:two` }, 'snapshotId', [taken[0].snapshotId])
  for (const { snapshotId } of taken) assert.equal(await call('Sandbox.deleteSnapshot', [snapshotId], {}), true)
  const [fork] = await call('Sandbox.fork', [box.sandboxId], { count: 1, timeoutMs: 60_000 })
  const query = { metadata: { walk: mark } }
  await page('Sandbox.list', { query, limit: 1 }, 'sandboxId', [fork.sandboxId])
  await page('Sandbox.list', { query, limit: 1, nextToken: at.pages.nextToken }, 'sandboxId', [box.sandboxId])
  await fork.kill()
  at.Sandbox = box
  const memory = { keepMemory: true }
  if (box.pause) assert.equal(await call('Sandbox.pause', [], memory), true)
  await call('Sandbox.connect', [], { timeoutMs: 600_000, onResume: 'restore' })
  assert.equal(await call('Sandbox.betaPause', [], memory), true)
  await call('Sandbox.connect', [], { timeoutMs: 600_000, onResume: 'reboot' })
}
