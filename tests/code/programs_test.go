package code

// A language is the table's row: one program for each case, how the language is run plainly, and
// the lines in its error messages.
type language struct {
	name, file string
	plain      string // by sh, in the directory of the file; the program's arguments are "$@"

	hello       string // prints "hello"
	stdin       string // prints its input in upper case
	exit        string // exits 3
	runtime     string // fails at once; its message has line
	line        string
	syntax      string // is no program; the message has syntaxLine
	syntaxLine  string
	timeout     string // prints "before" and waits for hours
	memory      string // uses 64 MB and prints "used"
	unicode     string // prints unicodeText
	large       string // prints largeLines lines
	files       string // writes in.txt to out.txt
	missing     string // needs the library nosuchlib; the message has missingText
	missingText string
	args        string // prints its arguments, one a line
	env         string // prints the variable CODE_TEST
	stderr      string // prints "out" to stdout and "err" to stderr
	cwd         string // prints the working directory
	failure     string // name of the failure of runtime; empty: it has none
	broken      string // name of the failure of syntax; empty: it has none
}

const (
	unicodeText = "žluťoučký 🐎 日本語"
	largeLines  = 100000 // of "line 0" and so on
)

var languages = []language{
	{
		name: "python", file: "main.py", plain: `python3 -u main.py "$@"`,
		hello:   "print('hello')\n",
		stdin:   "import sys\nprint(sys.stdin.read().upper(), end='')\n",
		exit:    "raise SystemExit(3)\n",
		runtime: "def f(x):\n    return 1 // x\n\nf(0)\n", line: "main.py\", line 2", failure: "ZeroDivisionError",
		syntax: "x = 1\ny = = 2\n", syntaxLine: "main.py\", line 2", broken: "SyntaxError",
		timeout: "print('before')\nimport time\ntime.sleep(10000)\n",
		memory:  "b = bytearray(64_000_000)\nfor i in range(0, len(b), 4096): b[i] = 1\nprint('used')\n",
		unicode: "print('" + unicodeText + "')\n",
		large:   "for i in range(100000): print('line', i)\n",
		files:   "open('out.txt', 'w').write(open('in.txt').read())\n",
		missing: "import nosuchlib\n", missingText: "No module named 'nosuchlib'",
		args:   "import sys\nfor a in sys.argv[1:]: print(a)\n",
		env:    "import os\nprint(os.environ['CODE_TEST'])\n",
		stderr: "import sys\nprint('out')\nprint('err', file=sys.stderr)\n",
		cwd:    "import os\nprint(os.getcwd())\n",
	},
	{
		name: "javascript", file: "main.js", plain: `node main.js "$@"`,
		hello:   "console.log('hello')\n",
		stdin:   "process.stdout.write(require('fs').readFileSync(0, 'utf8').toUpperCase())\n",
		exit:    "process.exit(3)\n",
		runtime: "function f(x) {\n  return x.y.z\n}\nf({})\n", line: "main.js:2", failure: "TypeError",
		syntax: "let x = 1\nlet y = = 2\n", syntaxLine: "main.js:2", broken: "SyntaxError",
		timeout: "console.log('before')\nsetTimeout(() => {}, 1e7)\n",
		memory:  "const b = Buffer.alloc(64000000, 1)\nconsole.log(b.length ? 'used' : '')\n",
		unicode: "console.log('" + unicodeText + "')\n",
		large:   "for (let i = 0; i < 100000; i++) console.log('line', i)\n",
		files:   "const fs = require('fs')\nfs.writeFileSync('out.txt', fs.readFileSync('in.txt'))\n",
		missing: "require('nosuchlib')\n", missingText: "Cannot find module 'nosuchlib'",
		args:   "for (const a of process.argv.slice(2)) console.log(a)\n",
		env:    "console.log(process.env.CODE_TEST)\n",
		stderr: "console.log('out')\nconsole.error('err')\n",
		cwd:    "console.log(process.cwd())\n",
	},
	{
		name: "typescript", file: "main.ts",
		plain:   `esbuild main.ts --outfile=main.js --sourcemap=inline --log-level=warning --color=false && exec node --enable-source-maps main.js "$@"`,
		hello:   "const s: string = 'hello'\nconsole.log(s)\n",
		stdin:   "declare const require: any\nprocess.stdout.write(require('fs').readFileSync(0, 'utf8').toUpperCase() as string)\n",
		exit:    "const code: number = 3\nprocess.exit(code)\n",
		runtime: "interface A { y?: { z: number } }\nfunction f(x: A): number {\n  return x.y!.z\n}\nf({})\n", line: "main.ts:3", failure: "TypeError",
		syntax: "let x: number = 1\nlet y: number = = 2\n", syntaxLine: "main.ts:2", broken: "CompileError",
		timeout: "console.log('before' as string)\nsetTimeout((): void => {}, 1e7)\n",
		memory:  "const b: Uint8Array = Buffer.alloc(64000000, 1)\nconsole.log(b.length ? 'used' : '')\n",
		unicode: "console.log('" + unicodeText + "' as string)\n",
		large:   "for (let i: number = 0; i < 100000; i++) console.log('line', i)\n",
		files:   "const fs: any = require('fs')\nfs.writeFileSync('out.txt', fs.readFileSync('in.txt'))\n",
		missing: "require('nosuchlib') as any\n", missingText: "Cannot find module 'nosuchlib'",
		args:   "for (const a of process.argv.slice(2) as string[]) console.log(a)\n",
		env:    "console.log(process.env.CODE_TEST as string)\n",
		stderr: "console.log('out' as string)\nconsole.error('err' as string)\n",
		cwd:    "console.log(process.cwd() as string)\n",
	},
	{
		// The quick compiler alone: what a program prints does not depend on it, and a start takes two
		// thirds of the processor time.
		name: "java", file: "Main.java", plain: `java -XX:TieredStopAtLevel=1 -XX:+UseSerialGC Main.java "$@"`,
		hello:   javaMain(`System.out.println("hello");`),
		stdin:   javaMain(`System.out.print(new String(System.in.readAllBytes()).toUpperCase());`),
		exit:    javaMain(`System.exit(3);`),
		runtime: javaMain("int x = 0;\nint y = 1 / x;"), line: "Main.java:4", failure: "java.lang.ArithmeticException",
		syntax: javaMain("int x = 1;\nint y = = 2;"), syntaxLine: "Main.java:4", broken: "CompileError",
		timeout: javaMain(`System.out.println("before"); Thread.sleep(10000000);`),
		memory:  javaMain(`byte[] b = new byte[64000000]; for (int i = 0; i < b.length; i += 4096) b[i] = 1; System.out.println("used");`),
		unicode: javaMain(`new java.io.PrintStream(System.out, true, "UTF-8").println("` + unicodeText + `");`),
		large:   javaMain(`StringBuilder s = new StringBuilder(); for (int i = 0; i < 100000; i++) s.append("line ").append(i).append('\n'); System.out.print(s);`),
		files:   javaMain(`java.nio.file.Files.copy(java.nio.file.Path.of("in.txt"), java.nio.file.Path.of("out.txt"));`),
		missing: "import nosuchlib.X;\n" + javaMain(``), missingText: "package nosuchlib does not exist",
		args:   javaMain(`for (String a : args) System.out.println(a);`),
		env:    javaMain(`System.out.println(System.getenv("CODE_TEST"));`),
		stderr: javaMain(`System.out.println("out"); System.err.println("err");`),
		cwd:    javaMain(`System.out.println(System.getProperty("user.dir"));`),
	},
	{
		name: "cpp", file: "main.cpp", plain: `g++ -o main main.cpp -I. -pthread -std=c++17 && exec ./main "$@"`,
		hello:   "#include <iostream>\nint main() { std::cout << \"hello\\n\"; }\n",
		stdin:   "#include <iostream>\nint main() { char c; while (std::cin.get(c)) std::cout << (char)toupper(c); }\n",
		exit:    "int main() { return 3; }\n",
		runtime: "#include <cassert>\nint main(int argc, char**) {\n  assert(argc > 5);\n}\n", line: "main.cpp:3",
		syntax: "int main() {\n  int y = = 2;\n}\n", syntaxLine: "main.cpp:2", broken: "CompileError",
		timeout: "#include <iostream>\n#include <unistd.h>\nint main() { std::cout << \"before\" << std::endl; sleep(10000); }\n",
		memory:  "#include <vector>\n#include <cstdio>\nint main() { std::vector<char> b(64000000, 1); puts(b[5] ? \"used\" : \"\"); }\n",
		unicode: "#include <iostream>\nint main() { std::cout << \"" + unicodeText + "\\n\"; }\n",
		large:   "#include <cstdio>\nint main() { for (int i = 0; i < 100000; i++) printf(\"line %d\\n\", i); }\n",
		files:   "#include <fstream>\nint main() { std::ofstream(\"out.txt\") << std::ifstream(\"in.txt\").rdbuf(); }\n",
		missing: "#include <nosuchlib.h>\nint main() {}\n", missingText: "nosuchlib.h: No such file",
		args:   "#include <cstdio>\nint main(int n, char **v) { for (int i = 1; i < n; i++) puts(v[i]); }\n",
		env:    "#include <cstdio>\n#include <cstdlib>\nint main() { puts(getenv(\"CODE_TEST\")); }\n",
		stderr: "#include <iostream>\nint main() { std::cout << \"out\\n\"; std::cerr << \"err\\n\"; }\n",
		cwd:    "#include <cstdio>\n#include <unistd.h>\nint main() { char b[4096]; puts(getcwd(b, sizeof b)); }\n",
	},
	{
		name: "c", file: "main.c", plain: `gcc -o main main.c -I. -pthread -lm && exec ./main "$@"`,
		hello:   "#include <stdio.h>\nint main(void) { puts(\"hello\"); }\n",
		stdin:   "#include <stdio.h>\n#include <ctype.h>\nint main(void) { int c; while ((c = getchar()) != EOF) putchar(toupper(c)); }\n",
		exit:    "int main(void) { return 3; }\n",
		runtime: "#include <assert.h>\nint main(int argc, char **argv) {\n  assert(argc > 5);\n}\n", line: "main.c:3",
		syntax: "int main(void) {\n  int y = = 2;\n}\n", syntaxLine: "main.c:2", broken: "CompileError",
		timeout: "#include <stdio.h>\n#include <unistd.h>\nint main(void) { puts(\"before\"); fflush(stdout); sleep(10000); }\n",
		memory:  "#include <stdio.h>\n#include <stdlib.h>\n#include <string.h>\nint main(void) { char *b = malloc(64000000); memset(b, 1, 64000000); puts(b[5] ? \"used\" : \"\"); }\n",
		unicode: "#include <stdio.h>\nint main(void) { puts(\"" + unicodeText + "\"); }\n",
		large:   "#include <stdio.h>\nint main(void) { for (int i = 0; i < 100000; i++) printf(\"line %d\\n\", i); }\n",
		files:   "#include <stdio.h>\nint main(void) { FILE *i = fopen(\"in.txt\", \"r\"), *o = fopen(\"out.txt\", \"w\"); int c; while ((c = getc(i)) != EOF) putc(c, o); }\n",
		missing: "#include <nosuchlib.h>\nint main(void) {}\n", missingText: "nosuchlib.h: No such file",
		args:   "#include <stdio.h>\nint main(int n, char **v) { for (int i = 1; i < n; i++) puts(v[i]); }\n",
		env:    "#include <stdio.h>\n#include <stdlib.h>\nint main(void) { puts(getenv(\"CODE_TEST\")); }\n",
		stderr: "#include <stdio.h>\nint main(void) { puts(\"out\"); fputs(\"err\\n\", stderr); }\n",
		cwd:    "#include <stdio.h>\n#include <unistd.h>\nint main(void) { char b[4096]; puts(getcwd(b, sizeof b)); }\n",
	},
	{
		name: "go", file: "main.go", plain: `PATH=$PATH:/usr/local/go/bin && go build -o main main.go && exec ./main "$@"`,
		hello:   goMain(`fmt`, `fmt.Println("hello")`),
		stdin:   "package main\nimport (\"bytes\"; \"io\"; \"os\")\nfunc main() { b, _ := io.ReadAll(os.Stdin); os.Stdout.Write(bytes.ToUpper(b)) }\n",
		exit:    goMain(`os`, `os.Exit(3)`),
		runtime: "package main\nfunc main() {\n\tvar m map[string]int\n\tm[\"x\"] = 1\n}\n", line: "main.go:4", failure: "panic",
		syntax: "package main\nfunc main() {\n\tx := = 2\n}\n", syntaxLine: "main.go:3", broken: "CompileError",
		timeout: "package main\nimport (\"fmt\"; \"time\")\nfunc main() { fmt.Println(\"before\"); time.Sleep(1e13) }\n",
		memory:  goMain(`fmt`, `b := make([]byte, 64000000); for i := 0; i < len(b); i += 4096 { b[i] = 1 }; if b[0] == 1 { fmt.Println("used") }`),
		unicode: goMain(`fmt`, `fmt.Println("`+unicodeText+`")`),
		large:   goMain(`fmt`, `for i := range [100000]int{} { fmt.Println("line", i) }`),
		files:   goMain(`os`, `b, _ := os.ReadFile("in.txt"); os.WriteFile("out.txt", b, 0o644)`),
		missing: "package main\nimport _ \"example.com/nosuchlib\"\nfunc main() {}\n", missingText: "example.com/nosuchlib",
		args:   "package main\nimport (\"fmt\"; \"os\")\nfunc main() { for _, a := range os.Args[1:] { fmt.Println(a) } }\n",
		env:    "package main\nimport (\"fmt\"; \"os\")\nfunc main() { fmt.Println(os.Getenv(\"CODE_TEST\")) }\n",
		stderr: "package main\nimport (\"fmt\"; \"os\")\nfunc main() { fmt.Println(\"out\"); fmt.Fprintln(os.Stderr, \"err\") }\n",
		cwd:    "package main\nimport (\"fmt\"; \"os\")\nfunc main() { d, _ := os.Getwd(); fmt.Println(d) }\n",
	},
	{
		name: "ruby", file: "main.rb", plain: `ruby main.rb "$@"`,
		hello:   "puts 'hello'\n",
		stdin:   "print STDIN.read.upcase\n",
		exit:    "exit 3\n",
		runtime: "def f(x)\n  raise ArgumentError, 'bad'\nend\nf(0)\n", line: "main.rb:2", failure: "ArgumentError",
		syntax: "x = 1\ny = = 2\n", syntaxLine: "main.rb:2", broken: "SyntaxError",
		timeout: "puts 'before'\nsleep 10000\n",
		memory:  "b = 'x' * 64_000_000\nputs 'used' if b.getbyte(5)\n",
		unicode: "puts '" + unicodeText + "'\n",
		large:   "100000.times { |i| puts \"line #{i}\" }\n",
		files:   "File.write('out.txt', File.read('in.txt'))\n",
		missing: "require 'nosuchlib'\n", missingText: "cannot load such file -- nosuchlib",
		args:   "ARGV.each { |a| puts a }\n",
		env:    "puts ENV['CODE_TEST']\n",
		stderr: "puts 'out'\nwarn 'err'\n",
		cwd:    "puts Dir.pwd\n",
	},
	{
		name: "r", file: "main.R", plain: `Rscript main.R "$@"`,
		hello:   "cat('hello\\n')\n",
		stdin:   "cat(toupper(readLines(file('stdin'))), sep='\\n')\n",
		exit:    "quit(status=3)\n",
		runtime: "f <- function(x) {\n  stop('bad')\n}\nf(0)\n", line: "Error in f(0) : bad", failure: "Error", // R tells no lines of a script
		syntax: "x <- 1\ny <- <- 2\n", syntaxLine: "unexpected assignment", broken: "Error", // not here, either
		timeout: "cat('before\\n')\nSys.sleep(10000)\n",
		memory:  "b <- integer(16000000)\nb[] <- 1L\nif (b[5] == 1L) cat('used\\n')\n",
		unicode: "cat('" + unicodeText + "\\n')\n",
		large:   "cat(paste0('line ', 0:99999, '\\n'), sep='')\n",
		files:   "invisible(file.copy('in.txt', 'out.txt'))\n",
		missing: "library(nosuchlib)\n", missingText: "there is no package called ‘nosuchlib’",
		args:   "cat(paste0(commandArgs(TRUE), '\\n'), sep='')\n",
		env:    "cat(Sys.getenv('CODE_TEST'), '\\n', sep='')\n",
		stderr: "cat('out\\n')\ncat('err\\n', file=stderr())\n",
		cwd:    "cat(getwd(), '\\n', sep='')\n",
	},
	{
		name: "bash", file: "main.sh", plain: `bash main.sh "$@"`,
		hello:   "echo hello\n",
		stdin:   "tr a-z A-Z\n",
		exit:    "exit 3\n",
		runtime: "x=1\nnosuchprogram\n", line: "main.sh: line 2",
		syntax: "x=1\nif then\n", syntaxLine: "main.sh: line 2",
		timeout: "echo before\nsleep 10000\n",
		memory:  "printf -v b %64000000s\n[ ${#b} = 64000000 ] && echo used\n",
		unicode: "echo '" + unicodeText + "'\n",
		large:   "for ((i = 0; i < 100000; i++)); do echo line $i; done\n",
		files:   "cat in.txt >out.txt\n",
		missing: ". nosuchlib\n", missingText: "nosuchlib: ",
		args:   "for a; do echo \"$a\"; done\n",
		env:    "echo $CODE_TEST\n",
		stderr: "echo out\necho err >&2\n",
		cwd:    "pwd\n",
	},
}

func javaMain(body string) string {
	return "class Main {\npublic static void main(String[] args) throws Exception {\n" + body + "\n}\n}\n"
}

func goMain(pkg, body string) string {
	return "package main\nimport \"" + pkg + "\"\nfunc main() { " + body + " }\n"
}
