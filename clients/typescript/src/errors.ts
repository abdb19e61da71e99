import type { Code, Problem } from './api.js'

/**
 * SandboxError is the class of all errors of this package, but for the reason of an aborted signal.
 */
export class SandboxError extends Error {
  /** Code of the daemon's problem document; undefined if the daemon did not answer with one. */
  declare readonly code?: Code
  /** HTTP status of the answer. */
  declare readonly status?: number
  /** What was being done, to what, and the cause. */
  declare readonly detail?: string
  /** What to do about it. */
  declare readonly hint?: string

  constructor(message: string, options?: ErrorOptions & { problem?: Problem }) {
    super(message, options)
    this.name = new.target.name
    const p = options?.problem
    if (p) {
      this.code = p.code
      this.status = p.status
      this.detail = p.detail
      if (p.hint) this.hint = p.hint
    }
  }
}

/** InvalidArgumentError reports a request that is wrong: repeating it does not help. */
export class InvalidArgumentError extends SandboxError {}
/** TooLargeError reports a body that exceeds its bound. */
export class TooLargeError extends InvalidArgumentError {}
/** ForbiddenError reports that the user of this process may not do it. */
export class ForbiddenError extends SandboxError {}
/** NotFoundError reports that there is no such sandbox, image, file or command. */
export class NotFoundError extends SandboxError {}
/** AlreadyExistsError reports a name that is taken. */
export class AlreadyExistsError extends SandboxError {}
/**
 * ConflictError reports that the state of the sandbox does not allow it, or that no room is left.
 */
export class ConflictError extends SandboxError {}
/** GoneError reports that the sandbox ended during the request. */
export class GoneError extends SandboxError {}
/** ProgramNotFoundError reports that the sandbox has no such program. */
export class ProgramNotFoundError extends SandboxError {}
/** ProgramNotAllowedError reports a program that is not executable. */
export class ProgramNotAllowedError extends SandboxError {}
/** UnenforceableError reports a restriction that the host cannot apply. */
export class UnenforceableError extends SandboxError {}
/** RegistryError reports a registry that refused, is unreachable or sent invalid data. */
export class RegistryError extends SandboxError {}
/** ImageError reports an image that is invalid. */
export class ImageError extends SandboxError {}
/** BuildError reports that a program of a build failed. */
export class BuildError extends SandboxError {}
/** LanguageNotFoundError reports that the sandbox has no program that runs a language. */
export class LanguageNotFoundError extends SandboxError {}
/** InstallError reports that a package manager failed; detail ends with its output. */
export class InstallError extends SandboxError {}
/** CodeRefusedError reports that a code policy or the operator's hook refuses the code; problem.findings has the lines. */
export class CodeRefusedError extends SandboxError {}
/** UnavailableError reports that the daemon is stopping, is not running or cannot be reached. */
export class UnavailableError extends SandboxError {}
/** InternalError reports a defect of the daemon. */
export class InternalError extends SandboxError {}

/** ConnectionError reports that the connection broke: the outcome of the request is unknown. */
export class ConnectionError extends SandboxError {}

/**
 * TimeoutError reports that a command, code or request took longer than its timeout. Of a command,
 * result holds the output until then.
 */
export class TimeoutError<T = unknown> extends SandboxError {
  declare readonly result?: T

  constructor(message: string, options?: ErrorOptions & { result?: T }) {
    super(message, options)
    if (options?.result !== undefined) this.result = options.result
  }
}

const classes: Record<Code, new (message: string, options?: ErrorOptions & { problem?: Problem }) => SandboxError> = {
  invalid_argument: InvalidArgumentError,
  too_large: TooLargeError,
  forbidden: ForbiddenError,
  not_found: NotFoundError,
  already_exists: AlreadyExistsError,
  conflict: ConflictError,
  gone: GoneError,
  program_not_found: ProgramNotFoundError,
  program_not_allowed: ProgramNotAllowedError,
  unenforceable: UnenforceableError,
  registry_error: RegistryError,
  image_invalid: ImageError,
  build_failed: BuildError,
  language_not_found: LanguageNotFoundError,
  install_failed: InstallError,
  code_refused: CodeRefusedError,
  unavailable: UnavailableError,
  internal: InternalError,
}

/**
 * problemError returns the error of a problem document. A code of a later daemon is a SandboxError.
 */
export function problemError(p: Problem): SandboxError {
  const message = p.hint ? `${p.detail} (${p.hint})` : p.detail
  return new (Object.hasOwn(classes, p.code) ? classes[p.code] : SandboxError)(message, { problem: p })
}

/** isProblem reports whether a value that came from outside is a problem document. */
export function isProblem(value: unknown): value is Problem {
  return typeof value === 'object' && value !== null && typeof (value as Problem).code === 'string' &&
    typeof (value as Problem).detail === 'string'
}
