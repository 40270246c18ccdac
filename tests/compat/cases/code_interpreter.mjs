// The code interpreter, as a user of its JavaScript client calls it.
import assert from 'node:assert/strict'
import { create, rejects } from './shared.mjs'

const interpreter = globalThis.compat.client('@e2b/code-interpreter')
const e2b = globalThis.compat.client('e2b')
let made

function sandbox() {
  made ??= create(interpreter.Sandbox)
  return made
}

export async function test_state_stays_and_output_streams() {
  const box = await sandbox()
  await box.runCode('x = 20')
  const heard = []
  const done = await box.runCode("print('out'); x + 1", { onStdout: (out) => heard.push(out.line) })
  assert.equal(done.text, '21')
  assert.deepEqual(done.logs.stdout, ['out\n'])
  assert.deepEqual(heard, ['out\n'])
}

export async function test_charts_and_tables() {
  const box = await sandbox()
  const drawn = await box.runCode('import matplotlib.pyplot as plt; plt.plot([1, 2], [3, 4]); plt.show()')
  assert.ok(Buffer.from(drawn.results[0].png, 'base64').subarray(1, 4).equals(Buffer.from('PNG')))
  assert.equal(drawn.results[0].chart.type, 'line')
  const table = await box.runCode("import pandas as pd; pd.DataFrame({'a': [1, 2]})")
  assert.deepEqual(table.results[0].data, { a: [1, 2] })
}

export async function test_errors_have_tracebacks() {
  const done = await (await sandbox()).runCode('1 / 0')
  assert.equal(done.error.name, 'ZeroDivisionError')
  assert.ok(done.error.traceback.includes('division by zero'))
}

export async function test_variables_of_one_execution() {
  const box = await sandbox()
  const code = "import os; os.environ.get('ONE')"
  assert.equal((await box.runCode(code, { envs: { ONE: 'here' } })).text, 'here')
  assert.equal((await box.runCode(code)).text, undefined)
}

export async function test_contexts() {
  const box = await sandbox()
  const context = await box.createCodeContext({ cwd: '/tmp' })
  assert.equal((await box.runCode('import os; os.getcwd()', { context })).text, '/tmp')
  await box.restartCodeContext(context)
  assert.ok((await box.listCodeContexts()).some((one) => one.id === context.id))
  await box.removeCodeContext(context)
  await rejects(box.runCode('1', { context }), e2b.NotFoundError)
}

export async function test_other_languages() {
  const box = await sandbox()
  assert.equal((await box.runCode('[1, 2].length', { language: 'js' })).text, '2')
  assert.deepEqual((await box.runCode('echo hi', { language: 'bash' })).logs.stdout, ['hi\n'])
  await rejects(box.runCode('1', { language: 'r' }), e2b.SandboxError, '400')
}

export async function test_a_timeout_interrupts() {
  const box = await sandbox()
  await box.runCode('kept = 1')
  await rejects(box.runCode('while True: pass', { timeoutMs: 2000 }), e2b.TimeoutError)
  assert.equal((await box.runCode('kept')).text, '1')
}
