// Files, as a user of the JavaScript client calls them.
import assert from 'node:assert/strict'
import { e2b, isOld, rejects, sandbox, until } from './shared.mjs'

export async function test_every_format_round_trips() {
  const { files } = await sandbox()
  const info = await files.write('hello.txt', 'Grüße 👩‍👧\n')
  assert.deepEqual([info.name, info.path, info.type], ['hello.txt', '/home/user/hello.txt', 'file'])
  assert.equal(await files.read('hello.txt'), 'Grüße 👩‍👧\n')
  const blob = new Uint8Array(1_000_000).map((_, at) => at % 251)
  await files.write('blob', blob.buffer)
  assert.deepEqual(await files.read('blob', { format: 'bytes' }), blob)
  assert.equal((await files.read('blob', { format: 'blob' })).size, blob.length)
  let size = 0
  for await (const chunk of await files.read('blob', { format: 'stream' })) size += chunk.length
  assert.equal(size, blob.length)
  await files.write('empty', '')
  assert.equal(await files.read('empty'), '')
}

export async function test_gzip_both_ways() {
  const { files } = await sandbox()
  const text = 'the same again and again '.repeat(20_000)
  await files.write('packed.txt', text, { gzip: true })
  assert.equal((await files.getInfo('packed.txt')).size, text.length)
  assert.equal(await files.read('packed.txt', { gzip: true }), text)
}

export async function test_streams_are_written() {
  const { files } = await sandbox()
  await files.write('streamed', new Blob(['piece '.repeat(100_000)]).stream())
  assert.equal((await files.getInfo('streamed')).size, 600_000)
}

export async function test_several_files_in_one_call() {
  const { files } = await sandbox()
  const names = ['many/a.txt', 'many/deep/b.txt', '/tmp/many c.txt', 'many/日本.txt']
  const written = await files.write(names.map((path) => ({ path, data: `in ${path}` })))
  assert.equal(written[3].path, '/home/user/many/日本.txt')
  for (const name of names) assert.equal(await files.read(name), `in ${name}`)
}

export async function test_what_cannot_be_read_or_written_is_told() {
  const { files } = await sandbox()
  await rejects(files.read('missing'), e2b.NotFoundError, "path '/home/user/missing' does not exist")
  await files.makeDir('a-directory')
  await rejects(files.read('a-directory'), e2b.InvalidArgumentError, 'is a directory')
  await rejects(files.write('a-directory', 'x'), e2b.InvalidArgumentError, 'is a directory')
  await rejects(files.list('/', { user: 'nobody-here' }), e2b.AuthenticationError, "invalid username: 'nobody-here'")
  await rejects(files.read('hello.txt', { user: 'nobody-here' }), e2b.AuthenticationError, 'nobody-here')
}

export async function test_metadata_is_kept_and_replaced() {
  const { files } = await sandbox()
  const info = await files.write('tagged', 'x', { metadata: { Author: 'me' } })
  assert.deepEqual(info.metadata, { author: 'me' })
  assert.deepEqual((await files.getInfo('tagged')).metadata, { author: 'me' })
  await files.write('tagged', 'y')
  assert.equal((await files.getInfo('tagged')).metadata, undefined)
}

export async function test_entries_say_what_they_are() {
  const box = await sandbox()
  await box.commands.run('mkdir -p kinds && cd kinds && echo 12345 > f && chmod 640 f && ln -s f to-f && ln -s no x')
  const info = await box.files.getInfo('kinds/f')
  assert.deepEqual(
    [info.name, info.type, info.size, info.mode, info.permissions, info.owner, info.group],
    ['f', 'file', 6, 0o640, '-rw-r-----', 'user', 'user']
  )
  assert.ok(Math.abs(Date.now() - info.modifiedTime.getTime()) < 3_600_000)
  assert.equal((await box.files.getInfo('kinds/to-f')).symlinkTarget, '/home/user/kinds/f')
  assert.deepEqual((await box.files.list('kinds')).map((entry) => entry.name), ['f', 'to-f'])
}

export async function test_directories_names_and_removal() {
  const { files } = await sandbox()
  assert.equal(await files.makeDir('made/with/parents'), true)
  assert.equal(await files.makeDir('made/with/parents'), false)
  await files.write('made/old', 'kept')
  assert.equal((await files.rename('made/old', 'made/new/place')).path, '/home/user/made/new/place')
  assert.equal(await files.exists('made/old'), false)
  const paths = (await files.list('made', { depth: 2 })).map((entry) => entry.path)
  assert.deepEqual(paths, ['new', 'new/place', 'with', 'with/parents'].map((name) => `/home/user/made/${name}`))
  await files.remove('made')
  await files.remove('made')
  await rejects(files.list('made'), e2b.NotFoundError)
  await rejects(files.list('hello.txt'), e2b.InvalidArgumentError)
  await rejects(files.rename('made', 'x'), e2b.NotFoundError)
}

export async function test_signed_urls_download_and_upload() {
  const box = await sandbox()
  await box.files.write('signed.txt', 'from the inside')
  const opts = { useSignatureExpiration: 60 }
  const url = await box.downloadUrl('signed.txt', opts)
  assert.equal(await (await fetch(url)).text(), 'from the inside')
  const form = new FormData()
  form.append('file', new Blob(['from the outside']), 'put.txt')
  const put = await fetch(await box.uploadUrl('put.txt', opts), { method: 'POST', body: form })
  assert.equal(put.status, 200)
  assert.equal(await box.files.read('put.txt'), 'from the outside')
  assert.equal((await fetch(url.replace('signed.txt', 'put.txt'))).status, 401)
  const over = await fetch(await box.downloadUrl('signed.txt', { useSignatureExpiration: -10 }))
  assert.deepEqual(await over.json(), { code: 401, message: 'signature is already expired' })
}

export async function test_a_watch_tells_what_changes() {
  const { files } = await sandbox()
  await files.makeDir('watched')
  const seen = []
  const handle = await files.watchDir('watched', (event) => void seen.push(event), {
    recursive: true,
    ...(isOld ? {} : { includeEntry: true }),
  })
  await files.write('watched/deep/new', '12345')
  await until(() => seen.some((event) => event.name === 'deep'))
  await files.write('watched/deep/new', '123456')
  const written = await until(() => seen.find((event) => event.name === 'deep/new' && event.type === 'write'))
  if (!isOld) assert.equal(written.entry.name, 'new')
  await files.remove('watched/deep/new')
  await until(() => seen.some((event) => event.name === 'deep/new' && event.type === 'remove'))
  await handle.stop()
  await rejects(files.watchDir('no-such-directory', () => {}), e2b.NotFoundError)
  await rejects(files.watchDir('hello.txt', () => {}), e2b.SandboxError)
}
