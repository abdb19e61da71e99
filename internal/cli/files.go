package cli

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"path"
	"strconv"
	"strings"
	"time"

	"github.com/docker/go-units"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

func newFiles(d deps) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "files",
		Short: "Look at and change the files of a sandbox",
		Long: `Look at and change the files of a running sandbox. Every PATH starts at the
sandbox's root and is resolved there. Whole trees are copied with "sandboxd cp".`,
		Args: cmdline.UsageArgs(cobra.NoArgs),
	}
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	cmd.AddCommand(newFilesLs(d), newFilesStat(d), newFilesCat(d), newFilesWrite(d), newFilesMkdir(d), newFilesMv(d), newFilesRm(d), newFilesWatch(d))
	return cmd
}

// inSandbox checks an absolute path of a sandbox.
func inSandbox(p string) (string, error) {
	switch {
	case p == "":
		return "", cmdline.Usagef("the path is empty")
	case strings.ContainsRune(p, 0):
		return "", cmdline.Usagef("%q contains a NUL byte", p)
	case !strings.HasPrefix(p, "/"):
		p = "/" + p
	}
	return p, nil
}

// withPath calls f with a client, for the sandbox and the path of the first two arguments.
func withPath(d deps, args []string, f func(c *client.Client, id, path string) error) error {
	p, err := inSandbox(args[1])
	if err != nil {
		return err
	}
	c := d.Client()
	defer c.Close()
	return f(c, args[0], p)
}

type filesLsOptions struct {
	depth int
	json  bool
}

func newFilesLs(d deps) *cobra.Command {
	var opts filesLsOptions
	cmd := &cobra.Command{
		Use:   "ls SANDBOX PATH",
		Short: "List a directory",
		Long: `List what is in a directory of a sandbox, sorted, or show one file. A list has 10000
entries at most. Links are shown and not followed.`,
		Args: cmdline.UsageArgs(cobra.ExactArgs(2)),
		RunE: func(cmd *cobra.Command, args []string) error { return runFilesLs(cmd.Context(), args, opts, d) },
	}
	opts.addFlags(cmd.Flags())
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func (o *filesLsOptions) addFlags(f *pflag.FlagSet) {
	f.IntVar(&o.depth, "depth", 1, "how many `levels` of directories, 1 to 200")
	f.BoolVar(&o.json, "json", false, "print the list as JSON")
}

func runFilesLs(ctx context.Context, args []string, opts filesLsOptions, d deps) error {
	if opts.depth < 1 || opts.depth > 200 {
		return cmdline.Usagef("--depth %d is not between 1 and 200", opts.depth)
	}
	return withPath(d, args, func(c *client.Client, id, p string) error {
		there, err := c.StatFile(ctx, id, p, true)
		var list *api.FileList
		switch {
		case err != nil && errors.Is(err, &api.Problem{Code: api.CodeNotFound}), err == nil && there.Type != api.TypeDirectory:
			// The path is a file, or a link to nowhere.
			if there, err = c.StatFile(ctx, id, p, false); err != nil {
				return err
			}
			list = &api.FileList{Entries: []api.FileEntry{*there}}
		case err != nil:
			return err
		default:
			if list, err = c.ListFiles(ctx, id, p, opts.depth); err != nil {
				return err
			}
		}
		if opts.json {
			return cmdline.PrintJSON(d.Stdout, list)
		}
		rows := [][]string{}
		for i := range list.Entries {
			rows = append(rows, entryRow(&list.Entries[i], path.Clean(p)))
		}
		if err := cmdline.Table(d.Stdout, rows); err != nil {
			return err
		}
		if list.More {
			_, _ = io.WriteString(d.Stderr, "something is missing: too many entries, or too deep ones\n") // a note
		}
		return nil
	})
}

// entryRow returns a row of a list. The caller escapes the names.
func entryRow(e *api.FileEntry, dir string) []string {
	name := pathOf(e.Path, e.PathBytes)
	if below, ok := strings.CutPrefix(name, strings.TrimSuffix(dir, "/")+"/"); ok {
		name = below
	}
	size := "-"
	switch e.Type {
	case api.TypeFile:
		size = units.HumanSize(float64(e.Size))
	case api.TypeDirectory:
		name += "/"
	case api.TypeSymlink:
		name += " -> " + pathOf(e.Target, e.TargetBytes)
	case api.TypeFIFO, api.TypeSocket, api.TypeBlock, api.TypeChar:
	}
	if e.Error != "" {
		name += " (" + e.Error + ")"
	}
	owner := nameOr(e.User, e.UID) + ":" + nameOr(e.Group, e.GID)
	return []string{string(e.Type), e.Mode, owner, size, e.MTime.Local().Format(time.DateTime), name}
}

// pathOf returns a path, which need not be text.
func pathOf(text string, b []byte) string {
	if len(b) > 0 {
		return string(b)
	}
	return text
}

func nameOr(name string, id uint32) string {
	if name != "" {
		return name
	}
	return strconv.FormatUint(uint64(id), 10)
}

func newFilesStat(d deps) *cobra.Command {
	var follow, asJSON bool
	cmd := &cobra.Command{
		Use:   "stat SANDBOX PATH",
		Short: "Show what a path names",
		Args:  cmdline.UsageArgs(cobra.ExactArgs(2)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return withPath(d, args, func(c *client.Client, id, p string) error {
				e, err := c.StatFile(cmd.Context(), id, p, follow)
				if err != nil {
					return err
				}
				if asJSON {
					return cmdline.PrintJSON(d.Stdout, e)
				}
				return cmdline.Table(d.Stdout, [][]string{entryRow(e, "")})
			})
		},
	}
	cmd.Flags().BoolVarP(&follow, "follow", "L", false, "follow a link")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print it as JSON")
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func newFilesCat(d deps) *cobra.Command {
	var offset, length int64
	cmd := &cobra.Command{
		Use:   "cat SANDBOX PATH",
		Short: "Write a file to stdout",
		Long: `Write a regular file of a sandbox to stdout, byte for byte. What comes from a
sandbox can act on a terminal: look at it with a pager if in doubt.`,
		Args: cmdline.UsageArgs(cobra.ExactArgs(2)),
		RunE: func(cmd *cobra.Command, args []string) error {
			if offset < 0 {
				return cmdline.Usagef("--offset %d is negative", offset)
			}
			return withPath(d, args, func(c *client.Client, id, p string) error {
				ctx := cmd.Context()
				var r io.ReadCloser
				var err error
				if offset == 0 && length < 0 {
					r, err = c.ReadFile(ctx, id, p)
				} else {
					r, err = c.ReadFileRange(ctx, id, p, offset, length)
				}
				if err != nil {
					return err
				}
				defer r.Close()
				_, err = io.Copy(d.Stdout, r)
				return err
			})
		},
	}
	cmd.Flags().Int64Var(&offset, "offset", 0, "begin at this `byte`")
	cmd.Flags().Int64Var(&length, "length", -1, "write so many `bytes` at most; negative: to the file's end")
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

type filesWriteOptions struct {
	append     bool
	mode, user string
}

func newFilesWrite(d deps) *cobra.Command {
	var opts filesWriteOptions
	cmd := &cobra.Command{
		Use:   "write SANDBOX PATH",
		Short: "Write a file from stdin",
		Long: `Write a file of a sandbox from stdin, and make the directories above it. The file
appears whole or not at all. With --append it grows instead, part by part.`,
		Args: cmdline.UsageArgs(cobra.ExactArgs(2)),
		RunE: func(cmd *cobra.Command, args []string) error {
			mode, err := permissionsOf(opts.mode)
			if err != nil {
				return err
			}
			return withPath(d, args, func(c *client.Client, id, p string) error {
				write := c.WriteFile
				if opts.append {
					write = c.AppendFile
				}
				return write(cmd.Context(), id, p, d.Stdin, mode, opts.user)
			})
		},
	}
	cmd.Flags().BoolVarP(&opts.append, "append", "a", false, "write to the file's end")
	cmd.Flags().StringVar(&opts.mode, "mode", "", "octal `mode` of a new file (default 0644)")
	cmd.Flags().StringVar(&opts.user, "user", "", "owner of a new file: `name` or uid, and optionally :group (default: the sandbox's user)")
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

// permissionsOf parses a mode as chmod does; empty means 0.
func permissionsOf(s string) (fs.FileMode, error) {
	if s == "" {
		return 0, nil
	}
	mode, err := strconv.ParseUint(s, 8, 16)
	if err != nil || mode > 0o777 || mode == 0 {
		return 0, cmdline.Usagef("--mode %q is not octal, 1 to 777", s)
	}
	return fs.FileMode(mode), nil
}

func newFilesMkdir(d deps) *cobra.Command {
	var req api.MakeDirectory
	cmd := &cobra.Command{
		Use:   "mkdir SANDBOX PATH",
		Short: "Make a directory",
		Args:  cmdline.UsageArgs(cobra.ExactArgs(2)),
		RunE: func(cmd *cobra.Command, args []string) error {
			if _, err := permissionsOf(req.Mode); err != nil {
				return err
			}
			return withPath(d, args, func(c *client.Client, id, p string) error {
				req.Path, req.PathBytes = bodyPath(p)
				return c.MakeDirectory(cmd.Context(), id, req)
			})
		},
	}
	cmd.Flags().BoolVarP(&req.Parents, "parents", "p", false, "make missing parents too; no error if it exists")
	cmd.Flags().StringVar(&req.Mode, "mode", "", "octal `mode` (default 0755)")
	cmd.Flags().StringVar(&req.User, "user", "", "owner: `name` or uid, and optionally :group (default: the sandbox's user)")
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

// bodyPath returns a path for the two fields of a request body.
func bodyPath(p string) (string, []byte) {
	if strings.ToValidUTF8(p, "") == p {
		return p, nil
	}
	return "", []byte(p)
}

func newFilesMv(d deps) *cobra.Command {
	var overwrite bool
	cmd := &cobra.Command{
		Use:   "mv SANDBOX FROM TO",
		Short: "Rename a file or a directory",
		Long: `Rename a file or a directory within one file system of a sandbox. A TO that ends
with "/" is the directory to move into.`,
		Args: cmdline.UsageArgs(cobra.ExactArgs(3)),
		RunE: func(cmd *cobra.Command, args []string) error {
			to, err := inSandbox(args[2])
			if err != nil {
				return err
			}
			return withPath(d, args, func(c *client.Client, id, from string) error {
				if strings.HasSuffix(to, "/") {
					to = path.Join(to, path.Base(from))
				}
				req := api.MoveFile{Overwrite: overwrite}
				req.From, req.FromBytes = bodyPath(from)
				req.To, req.ToBytes = bodyPath(to)
				return c.MoveFile(cmd.Context(), id, req)
			})
		},
	}
	cmd.Flags().BoolVarP(&overwrite, "force", "f", false, "replace what is there: a file by a file, an empty directory by a directory")
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func newFilesRm(d deps) *cobra.Command {
	var recursive bool
	cmd := &cobra.Command{
		Use:   "rm SANDBOX PATH",
		Short: "Remove a file, a link or a directory",
		Long: `Remove a file, a link or an empty directory of a sandbox, or with --recursive a
directory with all that is in it. Links are removed and not followed, and mount
points stay.`,
		Args: cmdline.UsageArgs(cobra.ExactArgs(2)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return withPath(d, args, func(c *client.Client, id, p string) error {
				return c.RemoveFile(cmd.Context(), id, p, recursive)
			})
		},
	}
	cmd.Flags().BoolVarP(&recursive, "recursive", "r", false, "also what is in a directory")
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func newFilesWatch(d deps) *cobra.Command {
	var recursive, asJSON bool
	cmd := &cobra.Command{
		Use:   "watch SANDBOX PATH",
		Short: "Show changes as they happen",
		Long: `Show changes of a file or a directory of a sandbox as they happen, until it is gone
or you interrupt. "overflow" says that something was missed. Watching does not keep
a sandbox from ending when it is idle.`,
		Args: cmdline.UsageArgs(cobra.ExactArgs(2)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return withPath(d, args, func(c *client.Client, id, p string) error {
				return c.WatchFiles(cmd.Context(), id, p, recursive, func(e api.FileChange) error {
					if asJSON {
						return json.NewEncoder(d.Stdout).Encode(e)
					}
					_, err := io.WriteString(d.Stdout, changeLine(e)+"\n")
					return err
				})
			})
		},
	}
	cmd.Flags().BoolVarP(&recursive, "recursive", "r", false, "also the directories below; a sandbox has 8192 watched ones at most")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON document a line")
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func changeLine(e api.FileChange) string {
	line := string(e.Kind) + " "
	if e.Kind == api.FileMoved {
		line += pathOf(e.From, e.FromBytes) + " -> " + pathOf(e.To, e.ToBytes)
	} else {
		line += pathOf(e.Path, e.PathBytes)
	}
	if e.Type == api.TypeDirectory {
		line += "/"
	}
	return cmdline.Printable(line)
}
