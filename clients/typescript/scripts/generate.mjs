// Writes the types of the API: node generate.mjs OPENAPI OUTPUT. Each schema of the document
// becomes an exported type of its name. The form is that of this project's document, and anything
// else is an error.
import { readFileSync, writeFileSync } from 'node:fs'

const [source, target] = process.argv.slice(2)
if (!source || !target) throw new Error('usage: generate.mjs OPENAPI OUTPUT')
const schemas = JSON.parse(readFileSync(source, 'utf8')).components.schemas
const known = new Set(['type', 'properties', 'required', 'items', '$ref', 'description', 'enum', 'additionalProperties',
  'format', 'minimum', 'maximum', 'contentEncoding'])

/** Returns the TypeScript type of a schema. */
function type(schema, indent, where) {
  for (const key of Object.keys(schema)) {
    if (!known.has(key)) throw new Error(`${where}: unknown keyword ${key}`)
  }
  if (schema.$ref) return schema.$ref.replace('#/components/schemas/', '')
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(' | ')
  switch (schema.type) {
    case undefined: return 'unknown'
    case 'boolean': return 'boolean'
    case 'integer':
    case 'number': return 'number'
    case 'string': return 'string'
    case 'array': {
      const item = schema.items ? type(schema.items, indent, where + '[]') : 'unknown'
      return /[ |]/.test(item) ? `Array<${item}>` : item + '[]'
    }
    case 'object': return schema.properties ? object(schema, indent, where) : map(schema, indent, where)
  }
  if (Array.isArray(schema.type)) {
    return schema.type.map((t) => t === 'null' ? 'null' : type({ ...schema, type: t }, indent, where)).join(' | ')
  }
  throw new Error(`${where}: unknown type ${schema.type}`)
}

function map(schema, indent, where) {
  const value = schema.additionalProperties
  return `Record<string, ${value && value !== true ? type(value, indent, where + '{}') : 'unknown'}>`
}

function object(schema, indent, where) {
  const required = new Set(schema.required)
  const fields = Object.entries(schema.properties).map(([name, field]) => {
    const key = /^[A-Za-z_]\w*$/.test(name) ? name : JSON.stringify(name)
    return comment(field, indent + '  ') +
      `${indent}  ${key}${required.has(name) ? '' : '?'}: ${type(field, indent + '  ', where + '.' + name)}\n`
  })
  return `{\n${fields.join('')}${indent}}`
}

function comment(schema, indent) {
  const notes = [schema.description]
  if (schema.contentEncoding) notes.push(`(${schema.contentEncoding})`)
  if (schema.format === 'date-time') notes.push('(RFC 3339)')
  const text = notes.filter(Boolean).join(' ').replaceAll('*/', '*\\/')
  if (!text) return ''
  const lines = ['']
  for (const word of text.split(/\s+/)) { // of at most 100 columns
    const last = lines.length - 1
    if (indent.length + 4 + lines[last].length + word.length > 100) lines.push(word)
    else lines[last] += (lines[last] && ' ') + word
  }
  if (lines.length === 1 && indent.length + 7 + lines[0].length <= 100) return `${indent}/** ${lines[0]} */\n`
  return `${indent}/**\n${lines.map((line) => `${indent} * ${line}\n`).join('')}${indent} */\n`
}

let out = '// Generated from docs/reference/openapi.json by `npm run generate`.\n'
for (const [name, schema] of Object.entries(schemas)) {
  out += '\n' + comment(schema, '')
  const body = type(schema, '', name)
  out += body.startsWith('{') ? `export interface ${name} ${body}\n` : `export type ${name} = ${body}\n`
}
writeFileSync(target, out)
