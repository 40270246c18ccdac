// The public methods of `Sandbox` that speak to the control API, with their error cases.
import assert from 'node:assert/strict'

const { client, atEnd, version } = globalThis.compat
const { Sandbox, Template, NotFoundError, SandboxError, AuthenticationError } = client('e2b')
const NEW = version === 'js-2.51'
const NOWHERE = 'sb00000000000000000000'
let kept

async function box() {
  if (!kept) {
    kept = await Sandbox.create('base', { timeoutMs: 900_000, metadata: { case: 'control', 'k y': 'v/1' }, envs: { A: '1' } })
    atEnd.push(() => kept.kill())
  }
  return kept
}

const pause = (sandbox, options) => (sandbox.pause ?? sandbox.betaPause).call(sandbox, options)

export async function test_create_and_look() {
  const sandbox = await box()
  const info = await sandbox.getInfo()
  assert.equal(info.sandboxId, sandbox.sandboxId)
  assert.equal(info.templateId, 'base')
  assert.equal(info.state, 'running')
  assert.deepEqual(info.metadata, { case: 'control', 'k y': 'v/1' })
  assert.deepEqual((await Sandbox.getInfo(sandbox.sandboxId)).endAt, info.endAt)
  assert.equal(sandbox.getHost(80), `80-${sandbox.sandboxId}.localhost:${new URL(process.env.E2B_API_URL).port}`)
}

export async function test_refused_options() {
  await assert.rejects(Sandbox.create('no-such-template'), /404.*no-such-template/)
  await assert.rejects(Sandbox.create('base', { timeoutMs: 99_999_000 }), /timeout: must be from 0 to 14400/)
  await assert.rejects(Sandbox.create('base', { network: { allowOut: ['1.1.1.1'] } }), /network\.allowOut/)
  await assert.rejects(Sandbox.create('base', { apiKey: `e2b_${'0'.repeat(40)}` }), AuthenticationError)
}

export async function test_timeouts() {
  const sandbox = await box()
  await sandbox.setTimeout(1_200_000)
  const later = (await sandbox.getInfo()).endAt
  await Sandbox.setTimeout(sandbox.sandboxId, 600_000)
  const end = (await sandbox.getInfo()).endAt
  assert.ok(end < later)
  await Sandbox.connect(sandbox.sandboxId, { timeoutMs: 60_000 })
  assert.deepEqual((await sandbox.getInfo()).endAt, end)
  await Sandbox.connect(sandbox.sandboxId, { timeoutMs: 1_800_000 })
  assert.ok((await sandbox.getInfo()).endAt > end)
  await assert.rejects(Sandbox.setTimeout(NOWHERE, 60_000), NotFoundError)
  await assert.rejects(Sandbox.connect(NOWHERE), NotFoundError)
  const brief = await Sandbox.create('base', { timeoutMs: 5_000 })
  for (let n = 0; n < 300; n++) {
    try {
      await brief.getInfo()
    } catch (error) {
      assert.ok(error instanceof NotFoundError, error)
      return
    }
    await new Promise((wake) => setTimeout(wake, 200))
  }
  assert.fail('it has outlived its timeout')
}

export async function test_list_filters_and_pages() {
  const mark = `js-${Date.now()}`
  const made = []
  for (const n of [0, 1, 2]) {
    made.push(await Sandbox.create('base', { timeoutMs: 120_000, metadata: { mark, n: `${n} é&=%` } }))
  }
  const ids = (items) => items.map((one) => one.sandboxId)
  try {
    const newest = ids(made).reverse()
    const query = { metadata: { mark } }
    assert.deepEqual(ids(await Sandbox.list({ query }).nextItems()), newest)
    const one = Sandbox.list({ query: { metadata: { mark, n: '1 é&=%' } } })
    assert.deepEqual(ids(await one.nextItems()), [newest[1]])
    const pages = Sandbox.list({ query, limit: 2 })
    assert.deepEqual(ids(await pages.nextItems()), newest.slice(0, 2))
    assert.ok(pages.hasNext)
    await made[0].kill()
    assert.deepEqual(await pages.nextItems(), [])
    assert.ok(!pages.hasNext)
    await pause(made[1])
    const paused = Sandbox.list({ query: { ...query, state: ['paused'] } })
    assert.deepEqual(ids(await paused.nextItems()), [made[1].sandboxId])
    if (NEW) {
      const asc = Sandbox.list({ query, order: 'asc' })
      assert.deepEqual(ids(await asc.nextItems()), [made[1].sandboxId, made[2].sandboxId])
    }
    await assert.rejects(Sandbox.list({ limit: 101 }).nextItems(), /limit/)
  } finally {
    for (const sandbox of made) await sandbox.kill()
  }
}

export async function test_kill() {
  const sandbox = await Sandbox.create('base', { timeoutMs: 60_000 })
  assert.equal(await Sandbox.kill(sandbox.sandboxId), true)
  assert.equal(await Sandbox.kill(sandbox.sandboxId), false)
  assert.equal(await Sandbox.kill(NOWHERE), false)
  await assert.rejects(sandbox.getInfo(), NotFoundError)
  await assert.rejects(pause(sandbox), NotFoundError)
  await assert.rejects(sandbox.createSnapshot(), NotFoundError)
}

export async function test_pause_and_resume_by_connect() {
  const sandbox = await Sandbox.create('base', { timeoutMs: 600_000 })
  try {
    assert.equal(await pause(sandbox), true)
    assert.equal(await pause(sandbox), false)
    assert.equal((await sandbox.getInfo()).state, 'paused')
    assert.equal(await sandbox.isRunning(), false)
    const back = await Sandbox.connect(sandbox.sandboxId, { timeoutMs: 120_000 })
    assert.equal(back.sandboxId, sandbox.sandboxId)
    assert.equal((await sandbox.getInfo()).state, 'running')
    assert.equal(await sandbox.isRunning(), true)
  } finally {
    await sandbox.kill()
  }
  assert.equal(await sandbox.isRunning(), false)
}

export async function test_snapshots_and_forks() {
  const sandbox = await box()
  const name = `js-${Date.now()}`
  const snapshot = await sandbox.createSnapshot({ name })
  try {
    const listed = await Sandbox.listSnapshots({ sandboxId: sandbox.sandboxId }).nextItems()
    assert.deepEqual(listed.map((one) => one.snapshotId), [snapshot.snapshotId])
    const copy = await Sandbox.create(snapshot.snapshotId, { timeoutMs: 60_000 })
    await copy.kill()
  } finally {
    assert.equal(await Sandbox.deleteSnapshot(snapshot.snapshotId), true)
  }
  assert.equal(await Sandbox.deleteSnapshot(snapshot.snapshotId), false)
  const forks = await sandbox.fork({ count: 2, timeoutMs: 60_000 })
  assert.equal(forks.length, 2)
  for (const one of forks) {
    assert.ok(one instanceof Sandbox, one)
    await one.kill()
  }
  await assert.rejects(Sandbox.fork(NOWHERE), NotFoundError)
}

export async function test_metrics_and_network() {
  const sandbox = await box()
  const [point] = await sandbox.getMetrics()
  assert.equal(point.cpuCount, 1)
  assert.ok(point.memUsed > 0 && point.memUsed < point.memTotal)
  assert.deepEqual(await sandbox.getMetrics({ end: new Date(Date.now() - 3_600_000) }), [])
  await sandbox.updateNetwork({})
  await assert.rejects(sandbox.updateNetwork({ allowOut: ['1.1.1.1'] }), /allowOut/)
  await assert.rejects(Sandbox.updateNetwork(NOWHERE, {}), SandboxError)
}

export async function test_templates() {
  assert.equal(await Template.aliasExists('base'), true)
  assert.equal(await Template.aliasExists('never-was'), false)
  await assert.rejects(Template.build(Template().fromImage('debian'), { alias: 'x' }), /501/)
}
