// What tests share.
import assert from 'node:assert/strict'
import { TimeoutError } from 'sandboxd'

/**
 * Runs a program that says something and does not end by itself, and returns the error of its
 * timeout. How long it takes to say so is not judged: a timeout that was too short is doubled.
 */
export async function timedOut(run, said) {
  for (let timeoutMs = 200; ; timeoutMs *= 2) {
    const err = await run(timeoutMs).then(() => assert.fail('it has ended before its timeout'), (err) => err)
    assert.ok(err instanceof TimeoutError, err)
    if (said(err.result) !== '' || timeoutMs > 540_000) return err // testenv.HungAfter
  }
}
