package cli

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

type updateOptions struct {
	limitFlags

	labels   []string
	lifetime lifetime
	idle     cmdline.Seconds
	network  cmdline.Network
	restart  string
	json     bool
}

func newUpdate(d deps) *cobra.Command {
	var opts updateOptions
	cmd := &cobra.Command{
		Use:   "update [flags] SANDBOX",
		Short: "Change limits, lifetime, labels, network and restart policy of a sandbox",
		Long: `Change a running sandbox: all that is asked for or, with an error, nothing. What is
not named stays as it is; a limit of 0, or "", is the profile's default again. Only
--swap 0 says what it is: no swap. One that does not run can be given another network
and another restart policy.

Memory in use that cannot be taken back is no ground for killing anything: a
--memory below it is refused.`,
		Example: `  sandboxd update work --memory 512m --cpus 0.5
  sandboxd update work --lifetime 2h --label owner=me --label temporary-`,
		Args: cmdline.UsageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			req, err := opts.request(cmd.Flags().Changed)
			if err != nil {
				return err
			}
			return runUpdate(cmd.Context(), args[0], opts, req, d)
		},
	}
	opts.addFlags(cmd.Flags())
	cmdline.ExitStatus(cmd, cmdline.ExitPlain)
	return cmd
}

func (o *updateOptions) addFlags(f *pflag.FlagSet) {
	o.limitFlags.addFlags(f)
	f.StringArrayVarP(&o.labels, "label", "l", nil, "set a `label`: key=value; key- takes it away")
	f.Var(&o.lifetime, "lifetime", "stop the sandbox after this time from now on, whatever it does")
	f.Var(&o.lifetime, "timeout", "the same")
	f.Var(&o.idle, "idle-timeout", "stop it after this time without a request")
	f.Var(&o.network, "network", "of a sandbox that has one: full, or egress:POLICY; connections that it refuses are reset")
	f.StringVar(&o.restart, "restart", "", "`policy` of restarts from now on: no, on-failure[:N], always or unless-stopped")
	f.BoolVar(&o.json, "json", false, "print the whole sandbox as JSON")
}

// request returns the requested change.
func (o *updateOptions) request(changed func(string) bool) (api.UpdateSandbox, error) {
	req := api.UpdateSandbox{Timeout: float64(o.lifetime), IdleTimeout: float64(o.idle)}
	l := &req.Limits
	if changed("memory") {
		l.Memory = &o.memory.Bytes
	}
	if changed("memory-high") {
		l.MemoryHigh = &o.memoryHigh.Bytes
	}
	if changed("swap") {
		l.Swap = &o.swap.Bytes
	}
	if changed("oom-group") {
		l.OOMGroup = &o.oomGroup
	}
	if changed("cpus") {
		if !(o.cpus >= 0 && o.cpus <= 1e6) { // rejects NaN too
			return req, cmdline.Usagef("--cpus %v is not a number of cores", o.cpus)
		}
		l.CPUs = &o.cpus
	}
	if changed("cpu-weight") {
		l.CPUWeight = &o.cpuWeight
	}
	if changed("cpuset") {
		l.CPUSet = &o.cpuset
	}
	if changed("pids") {
		l.Pids = &o.pids
	}
	if changed("io-weight") {
		l.IO.Weight = &o.ioWeight
	}
	if changed("io-read-bps") {
		l.IO.ReadBPS = &o.readBPS.Bytes
	}
	if changed("io-write-bps") {
		l.IO.WriteBPS = &o.writeBPS.Bytes
	}
	if changed("io-read-iops") {
		l.IO.ReadIOPS = &o.readIOPS
	}
	if changed("io-write-iops") {
		l.IO.WriteIOPS = &o.writeIOPS
	}
	if changed("disk") {
		l.Disk = &o.disk.Bytes
	}
	if changed("inodes") {
		l.Inodes = &o.inodes.N
	}
	for _, label := range o.labels {
		key, value, set := strings.Cut(label, "=")
		key, gone := strings.CutSuffix(key, "-")
		if key == "" || set == gone {
			return req, cmdline.Usagef("--label %q is neither key=value nor key-", label)
		}
		if req.Labels == nil {
			req.Labels = map[string]*string{}
		}
		if req.Labels[key] = nil; set {
			req.Labels[key] = &value
		}
	}
	if changed("network") {
		network := o.network.Value()
		req.Network = &network
	}
	if changed("restart") {
		req.Restart = &o.restart
	}
	if *l == (api.LimitsUpdate{}) && req.Network == nil && req.Restart == nil && req.Labels == nil && req.Timeout == 0 && req.IdleTimeout == 0 {
		return req, cmdline.Usagef("nothing is to be changed; as in: sandboxd update SANDBOX --memory 512m")
	}
	return req, nil
}

func runUpdate(ctx context.Context, id string, opts updateOptions, req api.UpdateSandbox, d deps) error {
	c := d.Client()
	defer c.Close()
	sb, err := c.UpdateSandbox(ctx, id, req)
	if err != nil {
		return err
	}
	if opts.json {
		return cmdline.PrintJSON(d.Stdout, sb)
	}
	_, err = fmt.Fprintln(d.Stdout, cmdline.Printable(sb.ID))
	return err
}
