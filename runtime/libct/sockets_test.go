package libct

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Lists of sockets are summed up, and no further than the limit: a program can make them as long as
// it likes.
func TestUnreadMessages(t *testing.T) {
	netlink := func(received int) string {
		return fmt.Sprintf("00000000c1e0e4a5 0   2719       00000551 %-8d 0        0     2        0        21531\n", received)
	}
	udp := func(received string) string {
		return " 16363: 00000000:9088 00000000:0000 07 00000000:" + received + " 00:00000000 00000000     0        0 1208202 2 00000000ab50f673 0\n"
	}
	const head = "sk Eth Pid Groups Rmem Wmem Dump Locks Drops Inode\n"
	for name, c := range map[string]struct {
		list string
		of   func([]string) (int64, error)
		want int64
		bad  bool
	}{
		"none":           {list: head, of: ofNetlink},
		"idle":           {list: head + netlink(0), of: ofNetlink, want: emptySocket},
		"two":            {list: head + netlink(100) + netlink(23), of: ofNetlink, want: 123 + 2*emptySocket},
		"over the limit": {list: head + netlink(1<<30) + "nonsense", of: ofNetlink, want: 1<<30 + emptySocket},
		"overflown":      {list: head + netlink(-5), of: ofNetlink, want: emptySocket},
		"cut off":        {list: head + "00000000c1e0e4a5 0 1\n", of: ofNetlink, bad: true},
		"no number":      {list: head + strings.Replace(netlink(7), " 7 ", " x ", 1), of: ofNetlink, bad: true},
		"datagrams":      {list: head + udp("000EA600") + udp("00000001"), of: ofUDP, want: 0xea601 + 2*emptySocket},
		"negative":       {list: head + udp("FFFFFFFF"), of: ofUDP, want: emptySocket},
		"one queue":      {list: head + strings.Replace(udp("0"), ":0 ", " ", 1), of: ofUDP, bad: true},
		"a short line":   {list: head + " 1: 0:0\n", of: ofUDP, bad: true},
	} {
		got, err := sumOf(strings.NewReader(c.list), 1<<20, c.of)
		if (err != nil) != c.bad || !c.bad && got != c.want {
			t.Errorf("%s: %d, %v", name, got, err)
		}
	}
	if n, err := unread("/proc/self/net/", math.MaxInt64); err != nil || n < 0 {
		t.Errorf("this kernel's lists: %d, %v", n, err)
	}
}

// The kernel's own number is read, and its absence is an error.
func TestUnreclaimable(t *testing.T) {
	file := filepath.Join(t.TempDir(), "meminfo")
	for text, want := range map[string]int64{
		"Slab:  9 kB\nSReclaimable: 3 kB\nSUnreclaim:       12 kB\nKernelStack: 1 kB\n": 12 << 10,
		"Slab:  9 kB\n":                  -1,
		"Slab: 9 kB\nSUnreclaim: x kB\n": -1,
	} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		got, err := unreclaimable(file)
		if (err != nil) != (want < 0) || want >= 0 && got != want {
			t.Errorf("%q: %d, %v", text, got, err)
		}
	}
	if got, err := unreclaimable("/proc/meminfo"); err != nil || got <= 0 {
		t.Errorf("this kernel's: %d, %v", got, err)
	}
}

// Sandboxes are looked at when the kernel's memory has grown by a step, from wherever it began, and
// not otherwise.
func TestUnreadIsLookedAtAsTheKernelGrows(t *testing.T) {
	var now int64
	var failure error
	looks := 0
	w := &unreadWatch{
		grown:    func() (int64, error) { return now, failure },
		subjects: map[string]func(){"one": func() { looks++ }},
		running:  true,
	}
	var base int64
	var ok bool
	for i, c := range []struct {
		now   int64
		err   error
		looks int
	}{
		{now: 1 << 30, looks: 1},                          // not known before
		{now: 1<<30 + unreadStep - 1, looks: 1},           // less than a step
		{now: 1<<30 + unreadStep, looks: 2},               // a step
		{now: 1 << 20, looks: 2},                          // it shrinks
		{now: 1<<20 + unreadStep, looks: 3},               // and grows from there
		{now: 0, err: errors.New("unreadable"), looks: 3}, // nothing is known
		{now: 1<<20 + 2*unreadStep, looks: 4},             // what it has grown meanwhile
	} {
		now, failure = c.now, c.err
		if base, ok = w.look(base); !ok || looks != c.looks {
			t.Errorf("step %d: %d looks, want %d, %v", i, looks, c.looks, ok)
		}
	}
	w.remove("one")
	if _, ok := w.look(base); ok || w.running {
		t.Error("it goes on without a sandbox")
	}
}
