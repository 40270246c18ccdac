// Runs the cases of one file with the client in an environment of its own; see tests/support/clients.py.
//
// Arguments: the file, the environment. Reads names of cases, a line each; answers each with a line of JSON.
// A file gets the client by `client("e2b")`, for its own place is not where the packages are.
import { createRequire } from 'node:module'
import { pathToFileURL } from 'node:url'
import { createInterface } from 'node:readline'

const [, , file, environment] = process.argv
const packages = createRequire(`${environment}/package.json`)

export class Skipped extends Error {}

globalThis.compat = { client: (name) => packages(name), atEnd: [], Skipped, environment, version: process.env.SKERRY_COMPAT_CLIENT }

const write = process.stdout.write.bind(process.stdout)
process.stdout.write = process.stderr.write.bind(process.stderr) // what cases print goes to the log

// What a client lets go unheard, after a request that was given up, must not end the cases that follow.
process.on('unhandledRejection', (error) => console.error('unhandled:', error))

async function answer(run) {
  try {
    await run()
    return { result: 'passed', text: '' }
  } catch (error) {
    if (error instanceof Skipped) return { result: 'skipped', text: error.message }
    return { result: 'failed', text: error?.stack ?? String(error) }
  }
}

const cases = await import(pathToFileURL(file))
for await (const line of createInterface({ input: process.stdin })) {
  write(`${JSON.stringify(await answer(cases[line]))}\n`)
}
for (const close of globalThis.compat.atEnd.reverse()) await close()
process.exit(0)
