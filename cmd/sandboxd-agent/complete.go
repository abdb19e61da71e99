package main

import (
	"context"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/agent"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

// completeTimeout bounds the wait for a daemon's runs: a shell waits meanwhile.
const completeTimeout = time.Second

// completeRuns lets shells complete the names of runs: those of the output directory, where a
// command has one, and those that the daemon hosts. It starts no daemon; what goes wrong is silent,
// since the user is typing. Where no run fits, the shell offers files: a run may be a directory.
func completeRuns(root *cobra.Command, d cmdline.Deps) {
	for _, cmd := range root.Commands() {
		_, arg, ok := strings.Cut(cmd.Use, " RUN")
		if !ok {
			continue
		}
		cmd.ValidArgsFunction = func(cmd *cobra.Command, typed []string, word string) ([]cobra.Completion, cobra.ShellCompDirective) {
			if len(typed) > 0 && arg != "..." {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			fit := slices.DeleteFunc(runNames(cmd, d), func(c cobra.Completion) bool { return !strings.HasPrefix(c, word) })
			if len(fit) == 0 {
				return nil, cobra.ShellCompDirectiveDefault
			}
			return fit, cobra.ShellCompDirectiveNoFileComp
		}
	}
}

// runNames returns the names of runs, each with its state and task.
func runNames(cmd *cobra.Command, d cmdline.Deps) (out []cobra.Completion) {
	add := func(name, state, task string) {
		if cmdline.Printable(name) == name {
			out = append(out, cobra.CompletionWithDesc(name, cmdline.Printable(state+", "+agent.OneLine(task, 60))))
		}
	}
	if dir, err := cmd.Flags().GetString("output_dir"); err == nil {
		runs, _ := agent.ListRuns(dir)
		for i := range runs {
			add(filepath.Base(runs[i].Dir), string(runs[i].State), runs[i].Query)
		}
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), completeTimeout)
	defer cancel()
	hosted, _ := hostedRuns(ctx, d)
	for i := range hosted {
		add(hosted[i].ID, string(hosted[i].State), hosted[i].Query)
	}
	return out
}
