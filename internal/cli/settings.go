package cli

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/docker/go-units"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

// settingFlags are the settings of a sandbox, in Docker's words.
type settingFlags struct {
	hostname   string
	readOnly   bool
	tmpfs      []string
	volumes    []string
	mounts     []string
	shm        cmdline.Size
	ulimits    []string
	hosts      []string
	capDrop    []string
	capAdd     []string
	stopSignal string
	restart    string
	init       bool
	health     healthFlags
	workspace  string
	gitignore  bool
}

func (s *settingFlags) addFlags(f *pflag.FlagSet) {
	f.StringVar(&s.hostname, "hostname", "", "`name` of the host that programs see (default: the sandbox's name)")
	f.BoolVar(&s.readOnly, "read-only", false, "make the root read-only, with /tmp and /run too; see --tmpfs")
	f.StringArrayVar(&s.tmpfs, "tmpfs", nil, "mount an empty file system in memory: `PATH[:OPTION,...]`, by default size=64m,mode=1777,noexec; also uid, gid and exec; repeatable")
	f.StringArrayVarP(&s.volumes, "volume", "v", nil, "mount a volume by its name, or a directory or file of the host that serve --mount-root allows: `[SOURCE:]TARGET[:ro]`; repeatable")
	f.StringArrayVar(&s.mounts, "mount", nil, "mount by `options`: type=volume,source=NAME,target=PATH[,readonly][,volume-nocopy], type=bind,source=PATH,target=PATH[,readonly][,uid=N,gid=N], or type=tmpfs,target=PATH[,tmpfs-size=SIZE]; repeatable")
	s.shm.Least = 1
	f.Var(&s.shm, "shm-size", "size of /dev/shm, such as 256m (default 64m)")
	f.StringArrayVar(&s.ulimits, "ulimit", nil, "limit each process: `NAME=SOFT[:HARD]`, as nofile=1024:4096; names as in exec --rlimit; repeatable")
	f.StringArrayVar(&s.hosts, "add-host", nil, "add a line to /etc/hosts: `NAME:ADDRESS`; repeatable")
	f.StringArrayVar(&s.capDrop, "cap-drop", nil, "take a `capability` of the profile away, or ALL; repeatable")
	f.StringArrayVar(&s.capAdd, "cap-add", nil, "keep a `capability` of the profile, with --cap-drop ALL; repeatable")
	f.StringVar(&s.stopSignal, "stop-signal", "", "`signal` that asks programs to end when the sandbox is stopped (default: the image's, else SIGTERM)")
	f.StringVar(&s.restart, "restart", "", "start it again when its main process has ended, by a `policy`: no, on-failure[:N], always or unless-stopped")
	f.StringVar(&s.workspace, "workspace", "", "let programs work on a copy-on-write view of a directory: `DIR[:TARGET]`, by default at the image's working directory or /workspace")
	f.BoolVar(&s.gitignore, "gitignore", false, "hide what .gitignore files name from the programs too, as .sandboxdignore of the --workspace does in any case")
	s.health.addFlags(f)
	f.BoolVar(&s.init, "init", false, "run a small init as process 1, which every sandbox has in any case")
}

// settings returns the settings for a create request.
func (s *settingFlags) settings(ctx context.Context) (set api.Settings, err error) {
	set = api.Settings{
		Hostname: s.hostname, ReadOnly: s.readOnly, ShmSize: s.shm.Bytes, CapDrop: s.capDrop, CapAdd: s.capAdd, StopSignal: s.stopSignal, Restart: s.restart,
	}
	if set.HealthCheck, err = s.health.check(); err != nil {
		return set, err
	}
	for _, text := range s.tmpfs {
		m, err := parseTmpfs(text)
		if err != nil {
			return set, cmdline.Usagef("--tmpfs %q: %w", text, err)
		}
		set.Tmpfs = append(set.Tmpfs, m)
	}
	for _, text := range s.volumes {
		m, err := parseVolume(text)
		if err != nil {
			return set, cmdline.Usagef("-v %q: %w", text, err)
		}
		set.Mounts = append(set.Mounts, m)
	}
	for _, text := range s.mounts {
		m, memory, err := parseMount(text)
		switch {
		case err != nil:
			return set, cmdline.Usagef("--mount %q: %w", text, err)
		case memory != nil:
			set.Tmpfs = append(set.Tmpfs, *memory)
		default:
			set.Mounts = append(set.Mounts, *m)
		}
	}
	for _, text := range s.ulimits {
		name, l, err := parseUlimit(text)
		if err != nil {
			return set, cmdline.Usagef("--ulimit %q: %w", text, err)
		}
		if set.Rlimits == nil {
			set.Rlimits = make(map[string]api.Rlimit)
		}
		set.Rlimits[name] = l
	}
	for _, text := range s.hosts {
		h, err := parseHost(text)
		if err != nil {
			return set, cmdline.Usagef("--add-host %q: %w", text, err)
		}
		set.Hosts = append(set.Hosts, h)
	}
	set.Workspace, err = parseWorkspace(ctx, s.workspace, s.gitignore)
	return set, err
}

// parseTmpfs reads PATH[:OPTION,...] as Docker does. Like there, the default is noexec.
func parseTmpfs(text string) (api.Scratch, error) {
	at, options, given := strings.Cut(text, ":")
	m := api.Scratch{Path: at, NoExec: true}
	if at == "" {
		return m, errors.New("the path is missing, as in /tmp:size=64m")
	}
	if !given {
		return m, nil
	}
	for o := range strings.SplitSeq(options, ",") {
		name, value, _ := strings.Cut(o, "=")
		var err error
		switch name {
		case "rw", "nosuid", "nodev": // always
		case "exec", "noexec":
			m.NoExec = name == "noexec"
		case "size":
			m.Size, err = units.RAMInBytes(value)
			if err == nil && m.Size <= 0 {
				err = errors.New("less than a byte")
			}
		case "mode":
			var mode uint64
			mode, err = strconv.ParseUint(value, 8, 12)
			m.Mode = uint32(mode)
		case "uid", "gid":
			var id uint64
			id, err = strconv.ParseUint(value, 10, 16)
			if name == "uid" {
				m.UID = uint32(id)
			} else {
				m.GID = uint32(id)
			}
		case "ro":
			return m, errors.New("ro: it would be empty for ever; leave the option out")
		case "nr_inodes":
			return m, errors.New("nr_inodes: it follows from the size, one for each 4 KiB; leave the option out")
		default:
			return m, fmt.Errorf("option %q: there are size=64m, mode=1777, uid=N, gid=N, exec and noexec", o)
		}
		if err != nil {
			return m, fmt.Errorf("option %q: not a valid %s", o, name)
		}
	}
	return m, nil
}

// parseUlimit reads NAME=SOFT[:HARD]; -1 and "unlimited" mean none.
func parseUlimit(text string) (name string, l api.Rlimit, err error) {
	name, values, ok := strings.Cut(text, "=")
	if !ok || name == "" {
		return "", l, errors.New("not NAME=SOFT[:HARD], as in nofile=1024:4096")
	}
	soft, hard, two := strings.Cut(values, ":")
	if !two {
		hard = soft
	}
	for _, v := range []struct {
		text string
		to   *uint64
	}{{soft, &l.Soft}, {hard, &l.Hard}} {
		if v.text == "-1" || v.text == "unlimited" {
			*v.to = math.MaxUint64
		} else if *v.to, err = strconv.ParseUint(v.text, 10, 64); err != nil {
			return "", l, fmt.Errorf("%q is neither a number nor unlimited", v.text)
		}
	}
	if l.Soft > l.Hard {
		return "", l, fmt.Errorf("the soft limit, %s, exceeds the hard one", soft)
	}
	return name, l, nil
}

// parseHost reads NAME:ADDRESS or NAME=ADDRESS; an IPv6 address may stand in brackets.
func parseHost(text string) (api.HostAddress, error) {
	i := strings.IndexAny(text, ":=")
	if i < 1 {
		return api.HostAddress{}, errors.New("not NAME:ADDRESS, as in db:10.0.0.2")
	}
	name, address := text[:i], text[i+1:]
	if address == "host-gateway" {
		return api.HostAddress{}, errors.New("a sandbox does not reach the host's own addresses, so there is no host-gateway; run the service in a sandbox and join both to a network (--network net:NAME), or open it to the policy (sandboxd docs networks)")
	}
	if len(address) > 1 && address[0] == '[' && address[len(address)-1] == ']' {
		address = address[1 : len(address)-1]
	}
	if a, err := netip.ParseAddr(address); err != nil || a.Zone() != "" {
		return api.HostAddress{}, fmt.Errorf("%q is not an IP address", address)
	}
	return api.HostAddress{Name: name, Address: address}, nil
}

// maxEnvFile bounds a file of variables: the daemon takes no more than that in all.
const maxEnvFile = 1 << 20

// readEnvFile returns the lines of a file of variables, in Docker's format: KEY=value with the
// value as it stands, or KEY to pass on its value here. Empty lines and those that begin with # are
// left out.
func readEnvFile(name string) ([]string, error) {
	f, err := os.Open(filepath.Clean(name))
	if err != nil {
		return nil, fmt.Errorf("read variables: %w", err)
	}
	defer f.Close() // only read
	lines, err := parseEnvFile(f)
	if err != nil {
		return nil, fmt.Errorf("read variables: %s: %w", name, err)
	}
	return lines, nil
}

func parseEnvFile(r io.Reader) ([]string, error) {
	data, err := io.ReadAll(io.LimitReader(r, maxEnvFile+1))
	if err != nil {
		return nil, err
	}
	if len(data) > maxEnvFile {
		return nil, fmt.Errorf("larger than %d bytes", maxEnvFile)
	}
	var out []string
	scanner := bufio.NewScanner(strings.NewReader(strings.TrimPrefix(string(data), "\ufeff")))
	scanner.Buffer(nil, maxEnvFile+1)
	for n := 1; scanner.Scan(); n++ {
		line := strings.TrimLeftFunc(scanner.Text(), unicode.IsSpace)
		key, _, _ := strings.Cut(line, "=")
		switch {
		case line == "" || line[0] == '#':
			continue
		case key == "":
			return nil, fmt.Errorf("line %d: a variable without a name", n)
		case !utf8.ValidString(line): // not shown: it may be a secret
			return nil, fmt.Errorf("line %d: not UTF-8", n)
		case strings.ContainsFunc(key, unicode.IsSpace):
			return nil, fmt.Errorf("line %d: the name %q has a space", n, key)
		}
		out = append(out, line)
	}
	return out, scanner.Err()
}
