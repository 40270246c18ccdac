// What the JavaScript client declares: the methods of its classes, and the options that each takes.
import { readFileSync } from 'node:fs'

export class Declarations {
  constructor(file) {
    const text = readFileSync(file, 'utf8').replace(/\/\*[\s\S]*?\*\//g, '')
    this.classes = new Map()
    this.types = new Map()
    for (const found of text.matchAll(/^(?:export )?(declare (?:abstract )?class|interface|type) (\w+)/gm)) {
      const [kind, name] = [found[1], found[2]]
      const rest = text.slice(found.index + found[0].length)
      if (kind === 'type') this.types.set(name, rest.slice(0, end(rest, ';')))
      else {
        const open = rest.indexOf('{')
        const body = rest.slice(open + 1, open + 1 + end(rest.slice(open + 1), '}'))
        if (kind === 'interface') this.types.set(name, `${rest.slice(0, open)} & {${body}}`)
        else this.classes.set(name, { body, parent: /extends (\w+)/.exec(rest.slice(0, open))?.[1] })
      }
    }
  }

  // Name → options → their parts, of everything that users can call; what its parents declare too.
  methods(name) {
    const declared = this.classes.get(name)
    if (!declared) return new Map()
    const found = this.methods(declared.parent)
    for (const line of members(declared.body)) {
      const method = /^(?:static |abstract )*(\w+)(?:<[^(]*>)?\(/.exec(line)
      if (!method || method[1] === 'constructor' || /^(private|protected)/.test(line)) continue
      const options = found.get(method[1]) ?? new Map()
      const taken = /\bopts\??: /.exec(line)
      if (taken) {
        for (const [option, type] of this.fields(parameter(line.slice(taken.index + taken[0].length)))) {
          options.set(option, [...this.fields(type).keys()])
        }
      }
      found.set(method[1], options)
    }
    return found
  }

  // The fields of a type, with theirs.
  fields(type, seen = new Set()) {
    const found = new Map()
    const rest = type.replace(/\b(Pick|Omit)<(\w+), ([^>]+)>/g, (_, how, name, names) => {
      const chosen = new Set(names.match(/\w+/g))
      for (const [field, its] of this.fields(name, seen)) {
        if (chosen.has(field) === (how === 'Pick')) found.set(field, its)
      }
      return ''
    })
    for (const inline of blocks(rest)) {
      for (const member of members(inline)) {
        const field = /^(?:readonly )?(\w+)\??: ([\s\S]*)$/.exec(member)
        if (field) found.set(field[1], field[2])
      }
    }
    for (const name of outside(rest).match(/\b[A-Z]\w*/g) ?? []) {
      if (!this.types.has(name) || seen.has(name)) continue
      for (const [field, its] of this.fields(this.types.get(name), new Set([...seen, name]))) found.set(field, its)
    }
    return found
  }
}

// Where the first `stop` is that stands in no brackets.
function end(text, stop) {
  let depth = 0
  for (let at = 0; at < text.length; at++) {
    if (depth === 0 && text[at] === stop) return at
    if ('{([<'.includes(text[at])) depth++
    if ('})]>'.includes(text[at]) && text[at - 1] !== '=' && --depth < 0) return at
  }
  return text.length
}

function members(body) {
  const found = []
  for (let rest = body.trim(); rest; ) {
    const at = end(rest, ';')
    found.push(rest.slice(0, at).trim())
    rest = rest.slice(at + 1).trim()
  }
  return found
}

// The type of a parameter: up to the comma or the bracket that ends it.
function parameter(text) {
  return text.slice(0, Math.min(end(text, ','), end(text, ')')))
}

function blocks(text) {
  const found = []
  for (let at = text.indexOf('{'); at >= 0; at = text.indexOf('{', at)) {
    const length = end(text.slice(at + 1), '}')
    found.push(text.slice(at + 1, at + 1 + length))
    at += length + 2
  }
  return found
}

function outside(text) {
  let rest = text
  for (const block of blocks(text)) rest = rest.replace(`{${block}}`, '')
  return rest
}
