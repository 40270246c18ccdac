// Which client this is: the environments hold what they say, and run under Node 20.
import assert from 'node:assert/strict'

const { client, version } = globalThis.compat

export async function test_the_released_client_is_the_one_that_was_asked_for() {
  const { version: found } = client('e2b/package.json')
  assert.ok(found.startsWith(`${version.replace('js-', '')}.`), found)
}

export async function test_node_is_version_20() {
  assert.equal(process.versions.node.split('.')[0], '20')
}

// No case: what the tests of the runner itself run.
export async function broken() {
  throw new Error('as it should')
}
