// Package sandboxd is the client of the sandboxd daemon, over its Unix socket.
export type * as api from './api.js'
export type { Data } from './bytes.js'
export {
  Execution, ExecutionError, OutputMessage, Result, type Chart, type Context, type CreateContextOpts, type RunCodeOpts,
} from './code.js'
export {
  CommandExitError, CommandHandle, CommandResult, Commands, Pty, type CommandInfo, type CommandOpts, type ConnectOpts, type PtyOpts,
} from './commands.js'
export { NotRunningError, defaultSocket, type ConnectionOpts, type RequestOpts } from './connection.js'
export {
  AlreadyExistsError, BuildError, CodeRefusedError, ConflictError, ConnectionError, ForbiddenError, GoneError, ImageError, InstallError, InternalError, InvalidArgumentError,
  LanguageNotFoundError, NotFoundError, ProgramNotAllowedError, ProgramNotFoundError, RegistryError, SandboxError, TimeoutError, TooLargeError, UnavailableError,
  UnenforceableError,
} from './errors.js'
export {
  FileType, Files, FilesystemEventType, IncompleteListError, WatchHandle, type EntryInfo, type FilePath, type FilesystemEvent, type WriteInfo,
  type WriteOpts,
} from './files.js'
export { PortForward, Ports, type PortRequest } from './ports.js'
export { Sandbox, Sandbox as default } from './sandbox.js'
export {
  SandboxPaginator, type ForkOpts, type SandboxInfo, type SandboxListOpts, type SandboxOpts, type SnapshotInfo,
} from './sandbox.js'
