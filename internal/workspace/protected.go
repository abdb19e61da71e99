package workspace

import (
	"path"
	"strings"
	"unicode"
)

// Programs of the host execute what these names hold, or trust it with secrets, often without being
// asked: hooks and filters of git, start-up files of shells, tasks of editors. They are names of
// files, or of directories with everything below, at any depth.
var protectedNames = map[string]bool{}

func init() { //nolint:gochecknoinits // a table in the form in which it is read
	for name := range strings.FieldsSeq(`
		.gitmodules .gitconfig .husky .hg .svn .bzr
		.profile .bashrc .bash_profile .bash_login .bash_logout .bash_aliases .zshrc .zshenv .zprofile .zlogin .zlogout
		.kshrc .mkshrc .cshrc .tcshrc .login .logout .inputrc .config .local .xinitrc .xprofile .xsession .xsessionrc .pam_environment
		.envrc .direnv .mise.toml mise.toml .mise
		.vscode .vscode-server .idea .fleet .zed .devcontainer .devcontainer.json .vim .vimrc .gvimrc .exrc .nvimrc .nvim.lua .nvim
		.emacs .emacs.d .dir-locals.el .dir-locals-2.el .claude .cursor .mcp.json
		.gdbinit .lldbinit .pdbrc .irbrc .rprofile .screenrc .tmux.conf .ocamlinit .ghci .sqliterc .psqlrc .curlrc .wgetrc
		.ssh .gnupg .aws .azure .kube .docker .netrc .npmrc .yarnrc .yarnrc.yml .pypirc .cargo .gradle .m2 .pre-commit-config.yaml .sandboxd .sandboxdignore
	`) {
		protectedNames[name] = true
	}
}

// inGit are the names in a .git directory that a commit changes. All others are protected: a new
// version of git may execute what is in one.
var inGit = map[string]bool{
	"objects": true, "refs": true, "logs": true, "index": true, "head": true, "orig_head": true, "fetch_head": true, "merge_head": true,
	"cherry_pick_head": true, "revert_head": true, "packed-refs": true, "commit_editmsg": true, "merge_msg": true, "merge_mode": true,
	"squash_msg": true, "auto_merge": true, "description": true, "shallow": true, "gc.log": true, "gc.pid": true,
}

// Protected reports whether a path is applied only on the explicit wish of the user. It compares
// names as file systems without a difference of case do.
func Protected(name string) bool {
	parts := strings.Split(name, "/")
	for i, p := range parts {
		p = fold(p)
		if protectedNames[p] || path.Ext(p) == ".code-workspace" {
			return true
		}
		if p != ".git" && p != "git~1" {
			continue
		}
		rest := parts[i+1:]
		if len(rest) == 0 { // .git itself: a directory is harmless, a file or link leads git elsewhere
			return true
		}
		if !inGit[fold(rest[0])] || len(rest) > 1 && fold(rest[0]) == "objects" && fold(rest[1]) == "info" {
			return true
		}
	}
	return false
}

// fold returns the form in which a file system that ignores case compares a name: full case
// folding, without invisible characters, and without dots and spaces at its end, as on Windows.
func fold(name string) string {
	var b strings.Builder
	for _, r := range name {
		switch {
		case unicode.Is(unicode.Cf, r), unicode.Is(unicode.Mn, r), unicode.Is(unicode.Variation_Selector, r):
			continue
		case r == 'ß' || r == 'ẞ':
			b.WriteString("ss")
		case r >= 0xFB00 && r <= 0xFB06:
			b.WriteString([...]string{"ff", "fi", "fl", "ffi", "ffl", "st", "st"}[r-0xFB00])
		case r >= 0xFF01 && r <= 0xFF5E: // full width
			b.WriteRune(unicode.ToLower(r - 0xFEE0))
		default:
			least := r
			for next := unicode.SimpleFold(r); next != r; next = unicode.SimpleFold(next) {
				least = min(least, next)
			}
			b.WriteRune(unicode.ToLower(least))
		}
	}
	folded, _, _ := strings.Cut(b.String(), ":") // streams of NTFS
	return strings.TrimRight(folded, ". ")
}
