package attack

import (
	"fmt"
	"slices"
	"strings"
	"sync"
)

// leftover says how much an attack may leave behind in its process and namespaces.
type leftover int

const (
	unknown    leftover = iota // also where it is refused: it has a process of its own
	whereWorks                 // nothing where it is refused
	nothing                    // nothing, whether it works or not
)

// leftovers holds the attacks of which more is known than that they are attempts: calls that change
// nothing if they are refused, and those that only open, read, connect and close.
var leftovers = sync.OnceValue(func() map[string]leftover {
	all := make(map[string]leftover)
	for _, part := range [][]Attack{
		mounts(), namespaces(), initProcess(), kernelInterfaces(), hostControl(), files(), sockets(), network(), pools(), Egress(), {networkIsUp()},
	} {
		for _, a := range part {
			all[a.Name] = whereWorks
		}
	}
	for _, part := range [][]Attack{
		files(), sockets(), destinations(), metadata(), transports(), names(), services(), ownPorts(), sources(),
	} {
		for _, a := range part {
			all[a.Name] = nothing
		}
	}
	for _, a := range initProcess() {
		if strings.HasPrefix(a.Name, "read-") {
			all[a.Name] = nothing
		}
	}
	// They write, make nodes and mount, take a terminal, and change an interface.
	for _, name := range []string{"write-hostname-sysctl", "write-cgroup", "mknod-device", "mknod-mem", "open-console", "set-interface"} {
		all[name] = whereWorks
	}
	// They end threads, start processes, lower limits, and take several steps of which one may work.
	for name := range all {
		for _, prefix := range []string{"int80-abi", "x32-abi", "tcp-ulp", "nested-filter", "limit-", "trace-"} {
			if strings.HasPrefix(name, prefix) {
				delete(all, name)
			}
		}
	}
	return all
})

// isEgress reports whether an attack is one of [Egress], whose controls have a network.
func isEgress(name string) bool { return strings.HasPrefix(name, "egress-") || name == UpName }

// groups splits attacks, in their order, into those that one process tries, for each of which at
// least this is known.
func groups(attacks []string, known leftover) (all [][]string) {
	together := func(name string) bool { return leftovers()[name] >= known }
	for _, name := range attacks {
		if n := len(all); n > 0 {
			last := all[n-1][len(all[n-1])-1]
			if together(last) && together(name) && isEgress(last) == isEgress(name) {
				all[n-1] = append(all[n-1], name)
				continue
			}
		}
		all = append(all, []string{name})
	}
	return all
}

// Groups splits attacks, in their order, into those that one program may try. It ends after one
// that worked, or is killed; the rest of its group then has another program. [TryAll] does all
// that.
func Groups(attacks []string) [][]string { return groups(attacks, whereWorks) }

// TryAll tries attacks with as few programs as it takes. No attempt is made in a process that
// another attack has changed: after one that worked, the next has a process of its own.
//
// Run executes a program with the arguments [Try], and reports its output and whether SIGSYS ended
// it. Each gets the result of every attack.
func TryAll(attacks []string, run func(attacks []string) (said string, killed bool, err error), each func(name string, r Result) error) error {
	return tryAll(Groups(attacks), run, each)
}

func tryAll(groups [][]string, run func(attacks []string) (said string, killed bool, err error), each func(name string, r Result) error) error {
	for _, group := range groups {
		for len(group) > 0 {
			said, killed, err := run(group)
			if err != nil {
				return fmt.Errorf("%s: %w", group[0], err)
			}
			results, err := decodeAll(group, said)
			if err != nil {
				return err
			}
			if n := len(results); killed && n < len(group) {
				results = append(results, Result{Attack: group[n], Errno: Killed})
			}
			if len(results) == 0 {
				return fmt.Errorf("%s: the attacker printed nothing", group[0])
			}
			for i, r := range results {
				if err := each(group[i], r); err != nil {
					return fmt.Errorf("%s: %w", group[i], err)
				}
			}
			group = group[len(results):] // it ends after an attack that worked
		}
	}
	return nil
}

// decodeAll reads the output of a program that tries a group: a line for each attack, as far as it
// came. A line without a name says why it came no further.
func decodeAll(group []string, said string) (results []Result, err error) {
	for line := range strings.Lines(said) {
		if len(results) == len(group) {
			return nil, fmt.Errorf("the attacker printed %q after its last attack", line)
		}
		name := group[len(results)]
		r, err := Decode(line)
		switch {
		case err != nil:
			return nil, fmt.Errorf("%s: %w", name, err)
		case r.Attack == "":
			r.Attack = name
		case r.Attack != name:
			return nil, fmt.Errorf("%s: the result is that of %s", name, r.Attack)
		}
		results = append(results, r)
	}
	return results, nil
}

// try tries a group of attacks in this process and prints a result for each, until one may have
// changed the process.
func try(group []Attack) {
	for _, a := range group {
		err := a.try()
		report(a.Name, err)
		if left := leftovers()[a.Name]; left == unknown || err == nil && left == whereWorks {
			return
		}
	}
}

// findAll returns the attacks with these names; nil if one is not there.
func findAll(names []string) (all []Attack) {
	corpus := slices.Concat(Corpus(), Egress(), []Attack{networkIsUp()})
	for _, name := range names {
		i := slices.IndexFunc(corpus, func(a Attack) bool { return a.Name == name })
		if i < 0 {
			return nil
		}
		all = append(all, corpus[i])
	}
	return all
}
