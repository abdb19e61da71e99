package interpreter

var bash = &Language{
	Name: "bash", Aliases: []string{"sh", "shell"}, File: "main.sh", Extensions: []string{".sh", ".bash"}, Image: "base", Contexts: true,
	Toolchains: []Toolchain{{Run: []string{"bash", dir + "/main.sh"}}},
	Libraries:  apt,
}
