// What the cases for the JavaScript clients share: one sandbox for each file.
import assert from 'node:assert/strict'

const { client, atEnd, version } = globalThis.compat
export const e2b = client('e2b')
let made

export function sandbox() {
  made ??= create()
  return made
}

export async function create(kind = e2b.Sandbox) {
  const box = await kind.create({ timeoutMs: 1_800_000 })
  atEnd.push(() => box.kill())
  return box
}

export async function rejects(promise, kind, text = '') {
  const error = await promise.then(
    () => assert.fail(`${kind.name} was not raised`),
    (raised) => raised
  )
  assert.ok(error instanceof kind, `${error?.stack ?? error} is no ${kind.name}`)
  assert.ok(String(error.message).includes(text), `${error.message} does not say ${text}`)
  return error
}

// Wait for what is true soon.
export async function until(holds, seconds = 30) {
  const end = Date.now() + seconds * 1000
  for (;;) {
    const found = await holds()
    if (found) return found
    assert.ok(Date.now() < end, 'it did not come true')
    await new Promise((resolve) => setTimeout(resolve, 20))
  }
}

export const isOld = version === 'js-2.45'
