# The resident kernel of R contexts, which come on stdin behind their key. Requests follow as words
# (see doc.go). Output of programs is the exec's own; messages stand in it behind \001 and the key.
# R has neither a JSON reader nor a way to move descriptors, so "requests" is a pipe of a cat.
most <- 48L * 1024L
most_message <- 16 * 1024^2
out <- getConnection(1L) # not stdout(), which follows sink()
err <- getConnection(2L)
number <- 0
count <- 0L
interrupts <- 0L
plots <- file.path(tempdir(), "plots")
state <- new.env()

utf8 <- function(s) {
  s <- enc2utf8(as.character(s))
  bad <- !validUTF8(s)
  s[bad] <- iconv(s[bad], "latin1", "UTF-8")
  s
}
# JSON, with letters of ASCII only, as the locale may have no others.
string <- function(s) {
  vapply(utf8(s), function(s) {
    s <- gsub("\"", "\\\"", gsub("\\", "\\\\", s, fixed = TRUE), fixed = TRUE)
    if (!grepl("[^ -~]", s, perl = TRUE)) return(paste0("\"", s, "\""))
    points <- utf8ToInt(s)
    special <- which(points < 32L | points > 126L)
    letters <- intToUtf8(points, multiple = TRUE)
    high <- points[special] > 65535L
    p <- points[special] - 65536L
    letters[special] <- ifelse(high, sprintf("\\u%04x\\u%04x", 55296L + bitwShiftR(pmax(p, 0L), 10L), 56320L + bitwAnd(pmax(p, 0L), 1023L)),
      sprintf("\\u%04x", points[special]))
    paste0("\"", paste0(letters, collapse = ""), "\"")
  }, "", USE.NAMES = FALSE)
}
object <- function(fields) paste0("{", paste0(string(names(fields)), ":", unlist(fields), collapse = ","), "}")
array <- function(values) paste0("[", paste0(values, collapse = ","), "]")
scalars <- function(v) {
  if (is.logical(v)) s <- ifelse(v, "true", "false")
  else if (is.numeric(v) && !is.object(v)) s <- ifelse(is.finite(v), format(v, digits = 15, trim = TRUE, scientific = FALSE), "null")
  else s <- string(v)
  s[is.na(v)] <- "null"
  s
}

put <- function(con, text) {
  diverted <- if (identical(con, err)) sink.number(type = "message") else 2L
  if (diverted != 2L) {
    sink(type = "message")
    on.exit(sink(getConnection(diverted), type = "message"))
  }
  writeLines(text, con, sep = "", useBytes = TRUE)
  flush(con) # which a sink() holds back
}
say <- function(kind, data) {
  while (nchar(data) > most) {
    put(out, paste0("\001", key, ":+ ", format(number, scientific = FALSE), " ", most, "\n", substr(data, 1L, most)))
    data <- substr(data, most + 1L, nchar(data))
  }
  put(out, paste0("\001", key, ":", kind, " ", format(number, scientific = FALSE), " ", nchar(data), "\n", data))
}
publish <- function(bundle, main) {
  if (main) bundle$is_main_result <- "true"
  data <- object(bundle)
  if (nchar(data) > most_message) {
    bundle <- list(text = string(sprintf("a result of %d bytes, more than %d", nchar(data), as.integer(most_message))))
    if (main) bundle$is_main_result <- "true"
    data <- object(bundle)
  }
  say("r", data)
}

base64 <- function(bytes) {
  alphabet <- utf8ToInt("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")
  missing <- (3L - length(bytes) %% 3L) %% 3L
  v <- matrix(as.integer(c(bytes, raw(missing))), nrow = 3L)
  n <- v[1L, ] * 65536L + v[2L, ] * 256L + v[3L, ]
  text <- intToUtf8(alphabet[1L + rbind(n %/% 262144L, n %/% 4096L %% 64L, n %/% 64L %% 64L, n %% 64L)])
  if (missing > 0L) text <- paste0(substr(text, 1L, nchar(text) - missing), strrep("=", missing))
  text
}

# A device for each run, when the code draws. Its pages are files until they are shown.
device <- function(...) {
  if (!capabilities("png")) stop("plots need an R with png support")
  dir.create(plots, showWarnings = FALSE)
  state$device <- state$device + 1L
  grDevices::png(file.path(plots, sprintf("%d-%%05d.png", state$device)),
    width = getOption("repr.plot.width", 7), height = getOption("repr.plot.height", 5), units = "in", res = getOption("repr.plot.res", 100),
    type = if (capabilities("cairo")) "cairo" else getOption("bitmapType"))
  state$open <- c(state$open, grDevices::dev.cur())
}
state$device <- 0L
# Shows the pages that are finished, or all of them.
pages <- function(all, main = FALSE) {
  if (all) {
    for (d in state$open) {
      if (d %in% grDevices::dev.list() && names(grDevices::dev.list())[grDevices::dev.list() == d] == "png") grDevices::dev.off(d)
    }
    state$open <- integer()
  }
  files <- sort(list.files(plots, full.names = TRUE))
  if (!all && length(state$open) > 0L && any(state$open %in% grDevices::dev.list())) files <- files[0L]
  for (f in files) {
    bytes <- readBin(f, "raw", file.size(f))
    unlink(f)
    if (length(bytes) > 0L) publish(list(text = string("plot"), png = paste0("\"", base64(bytes), "\"")), main && f == files[length(files)])
  }
  length(files)
}
state$open <- integer()

show <- function(value, main) {
  text <- utils::capture.output(if (isS4(value)) methods::show(value) else print(value))
  if (length(text) == 0L) return(pages(TRUE, main)) # it has drawn
  bundle <- list(text = string(paste0(text, collapse = "\n")))
  if (is.data.frame(value)) {
    more <- tryCatch(table(value), error = function(e) NULL)
    bundle <- c(bundle, more)
  }
  publish(bundle, main)
}
escaped <- function(s) gsub(">", "&gt;", gsub("<", "&lt;", gsub("&", "&amp;", s, fixed = TRUE), fixed = TRUE), fixed = TRUE)
table <- function(frame) {
  names <- escaped(names(frame))
  few <- utils::head(as.data.frame(frame), 60L)
  cells <- do.call(cbind, c(list(escaped(rownames(few))), lapply(few, function(v) escaped(format(v)))))
  rows <- apply(cells, 1L, function(r) paste0("<tr><th>", r[1L], "</th>", paste0("<td>", r[-1L], "</td>", collapse = ""), "</tr>"))
  html <- paste0("<table>\n<thead><tr><th></th>", paste0("<th>", names, "</th>", collapse = ""), "</tr></thead>\n<tbody>\n", paste0(rows, collapse = "\n"), "\n</tbody>\n</table>")
  list(html = string(html), data = object(lapply(frame, function(v) array(scalars(v)))))
}

# What the user's code finds before R's own. The end of R is that of a run.
quit <- function(save = "default", status = 0, runLast = TRUE) {
  stop(structure(class = c("SystemExit", "error", "condition"), list(message = as.character(status), call = NULL, status = status)))
}
# R's own would close the requests, and wait for their cat, which no interrupt ends.
close_all <- function() {
  sink(type = "message")
  while (sink.number() > 0L) sink()
  for (i in setdiff(getAllConnections(), c(0:2, as.integer(requests)))) close(getConnection(i))
}
visible <- attach(list(display = function(...) for (v in list(...)) show(v, FALSE), quit = quit, q = quit, closeAllConnections = close_all, .Last.value = NULL),
  name = "sandboxd", warn.conflicts = FALSE)

ours <- quote(eval(exprs[i], globalenv()))
location <- function(call) {
  ref <- attr(call, "srcref")
  if (is.null(ref)) "" else sprintf("%s:%d", attr(ref, "srcfile")$filename, ref[1L])
}
bare <- function(call) {
  attr(call, "srcref") <- NULL
  call
}
one_line <- function(call) deparse(call, nlines = 1L)[1L]
# The texts and the code of an error, which the user's own methods may refuse.
words_of <- function(e) tryCatch(utf8(paste(conditionMessage(e), collapse = "\n")), error = function(e) "")
code_of <- function(e) {
  code <- tryCatch(suppressWarnings(as.integer(e$status)), error = function(e) NULL)
  if (length(code) == 1L && !is.na(code)) code else 1L
}
# Describes an error with the frames of the user's code, outermost first.
stack <- function(e, calls, name) {
  call <- conditionCall(e)
  if (identical(call, ours) || state$line == 0L) call <- NULL
  # The kernel's own are before these, and deal with the error behind them.
  calls <- calls[seq_along(calls) > state$depth + 3L]
  end <- Position(function(c) identical(c[[1L]], quote(.handleSimpleError)), calls, right = TRUE, nomatch = length(calls))
  frames <- calls[seq_len(max(0L, end - 1L))]
  shown <- vapply(frames, function(c) paste(c("", location(c)[nzchar(location(c))], one_line(c)), collapse = "  "), "")
  # What has failed may have no frame, but the handler knows where that was.
  at <- if (end > 0L) location(calls[[end]]) else ""
  if (nzchar(at)) {
    known <- is.null(call) || length(frames) > 0L && identical(call, bare(frames[[length(frames)]]))
    shown <- c(shown, paste(c("", at, if (!known) one_line(call)), collapse = "  "))
  }
  if (length(shown) == 0L && state$line > 0L) shown <- sprintf("  %s:%d", name, state$line)
  paste0(c(paste0(if (is.null(call)) "Error: " else paste0("Error in ", one_line(call), ": "), words_of(e)), shown), collapse = "\n")
}

evaluate <- function(code, name) {
  lines <- strsplit(code, "\n", fixed = TRUE)[[1L]]
  state$line <- 0L
  exprs <- parse(text = lines, keep.source = TRUE, srcfile = srcfilecopy(name, lines))
  refs <- attr(exprs, "srcref")
  for (i in seq_along(exprs)) {
    state$line <- refs[[i]][1L]
    state$depth <- sys.nframe()
    value <- withVisible(eval(exprs[i], globalenv())) # as in ours
    pages(FALSE)
    if (value$visible) show(value$value, i == length(exprs))
    visible$.Last.value <- value$value
  }
  pages(TRUE)
  NULL
}

run <- function(words) {
  number <<- as.numeric(words[1L])
  expected <- as.integer(words[2L])
  late <- proc.time()[["elapsed"]] + 0.5
  while (interrupts < expected && proc.time()[["elapsed"]] < late) {
    tryCatch(allowInterrupts(Sys.sleep(0.005)), interrupt = function(e) interrupts <<- interrupts + 1L)
  }
  interrupts <<- max(interrupts, expected)
  cpu <- sum(proc.time()[-3L])
  count <<- count + 1L
  name <- sprintf("<cell %d>", count)
  env <- vapply(words[-(1:3)], decoded, "")
  names <- sub("=.*", "", env)
  old <- Sys.getenv(names, NA)
  if (length(env) > 0L) do.call(Sys.setenv, structure(as.list(sub("^[^=]*=", "", env)), names = names))
  code <- 0L
  failure <- NULL
  calls <- list()
  tryCatch(
    withCallingHandlers(
      allowInterrupts(evaluate(decoded(words[3L]), name)),
      error = function(e) calls <<- sys.calls(),
      warning = function(w) {
        if (identical(conditionCall(w), ours) && getOption("warn") %in% 0:1) { # R would name the kernel's call
          cat("Warning: ", conditionMessage(w), "\n", sep = "", file = stderr())
          invokeRestart("muffleWarning")
        }
      }
    ),
    interrupt = function(e) {
      interrupts <<- interrupts + 1L
      failure <<- list(name = string("KeyboardInterrupt"), value = string(""))
    },
    error = function(e) {
      class <- if (state$line == 0L) "ParseError" else class(e)[1L]
      failure <<- list(
        name = string(if (class %in% c("simpleError", "error")) "Error" else substr(utf8(class), 1L, 1000L)),
        value = string(substr(words_of(e), 1L, 100000L))
      )
      if (class == "SystemExit") code <<- code_of(e)
      else failure$traceback <<- string(substr(tryCatch(utf8(stack(e, calls, name)), error = function(e) ""), 1L, 200000L))
    }
  )
  tryCatch(pages(TRUE), error = function(e) NULL)
  if (length(env) > 0L) {
    Sys.unsetenv(names[is.na(old)])
    if (any(!is.na(old))) do.call(Sys.setenv, as.list(old[!is.na(old)]))
  }
  if (!is.null(failure)) say("x", object(failure))
  put(err, paste0("\001", key, ":s ", format(number, scientific = FALSE), " 0\n"))
  peak <- tryCatch(as.numeric(gsub("[^0-9]", "", grep("^VmHWM", readLines("/proc/self/status"), value = TRUE))) * 1024, error = function(e) 0)
  say("d", object(list(
    ok = if (is.null(failure)) "true" else "false", count = count, code = code,
    cpu_ms = format(1000 * (sum(proc.time()[-3L]) - cpu), scientific = FALSE), memory_peak = format(peak, scientific = FALSE)
  )))
}
ascii <- vapply(1:127, intToUtf8, "")
decoded <- function(word) {
  if (word == "\\c") return("")
  parts <- strsplit(word, "\\", fixed = TRUE)[[1L]]
  if (length(parts) > 1L) {
    codes <- strtoi(substr(parts[-1L], 2L, 4L), 8L)
    if (any(codes == 0L)) stop("the code has a NUL")
    word <- paste0(parts[1L], paste0(ascii[codes], substring(parts[-1L], 5L), collapse = ""))
  }
  Encoding(word) <- "UTF-8"
  word
}

if (!l10n_info()$"UTF-8") Sys.setlocale("LC_CTYPE", "C.UTF-8") # as other languages have it
options(device = device, warn = 1, menu.graphics = FALSE)
say("h", object(list(protocol = 1, language = string("r"), version = string(paste0(R.version$major, ".", R.version$minor)))))
suspendInterrupts(repeat {
  line <- readLines(requests, 1L, warn = FALSE)
  if (length(line) == 0L) break
  words <- strsplit(line, " ", fixed = TRUE)[[1L]]
  if (length(words) < 4L || words[length(words)] != ".") next # cut off by the end of a daemon, or empty
  run(words[-length(words)])
})
base::quit(save = "no")
