package service

import (
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/guest/host"
	"github.com/sandboxd/sandboxd/internal/service/execlog"
	"github.com/sandboxd/sandboxd/internal/service/share"
	"github.com/sandboxd/sandboxd/interpreter/resident"
)

// Whatever becomes of what a kernel says, each read of it is paced, and each message by its work.
// The clock is the test's: what is counted is how many reads the waits are worth.
func TestKernelsAreReadAtAPace(t *testing.T) {
	const key = "KEY"
	frame := func(kind resident.Kind, payload string) string {
		head := binary.BigEndian.AppendUint32(nil, uint32(len(payload)))
		return string(append(head, byte(kind), 0, 0, 0, 1)) + payload
	}
	marked := func(kind resident.Kind, payload string) string {
		return fmt.Sprintf("\x00%s:%c 1 %d\n%s", key, kind, len(payload), payload)
	}
	const readSize = 64 << 10
	const result, failure = `{"text":"1"}`, `{"name":"E","value":""}`
	piece := strings.Repeat("x", resident.MaxFrame)
	large := strings.Repeat(frame(resident.KindPiece, piece), 40) + frame(resident.KindResult, "x")
	new(host.Pace).Wait(nil, 1) // measures the time of a read, for which it needs the machine's clock
	for _, flood := range []struct {
		name, language, stream, said string
		ready                        bool
		work                         int // of its messages
	}{
		{"results without memory", "python", "stdout", strings.Repeat(large, 8), true, 8 * (40*(resident.MaxFrame+messageWork) + 1 + messageWork)},
		{"small results", "python", "stdout", strings.Repeat(frame(resident.KindResult, result), 9000), true, 9000 * (len(result) + messageWork)},
		{"failures", "python", "stdout", strings.Repeat(frame(resident.KindError, failure), 9000), true, 9000 * (len(failure) + messageWork)},
		{"empty output", "python", "stdout", strings.Repeat(frame(resident.KindStdout, ""), 90_000), true, 0},
		{"stderr of its own", "python", "stderr", strings.Repeat("x", 5<<20), true, 0},
		{"output before it is ready", "bash", "stdout", strings.Repeat("x", 5<<20), false, 0},
		{"results between output", "bash", "stdout", strings.Repeat(marked(resident.KindResult, result), 9000), true, 9000 * (len(result) + messageWork)},
	} {
		t.Run(flood.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ended := make(chan struct{}) // never
				k, _ := resident.For(flood.language, key)
				c := &codeContext{s: &core{log: slog.New(slog.DiscardHandler)}, kernel: k, split: k.NewSplitter()}
				l, err := execlog.New(64<<20, false)
				if err != nil {
					t.Fatal(err)
				}
				defer l.Close()
				c.x = &Detached{program: &program{done: ended}, log: l}
				c.place.Run, c.place.Ready = 1, flood.ready
				c.hold = l.Hold(0)
				if n, err := l.Take(flood.stream, func(file int) (int, error) { return unix.Write(file, []byte(flood.said)) }); err != nil || n != len(flood.said) {
					t.Fatalf("%d, %v", n, err)
				}
				l.Finish()

				c.pace.pace.Wait(ended, 1<<14) // its burst is used up
				began := time.Now()
				c.pace.pace.Wait(ended, 1)
				each := time.Since(began)

				none := &resultHold{quota: &share.Quota{}}
				events := 0
				out := &runEvents{hold: none, reader: resident.Reader{Run: 1, Take: none.take}, emit: func(api.CodeEvent) error { events++; return nil }}
				out.timedOut = func() bool { return false }
				handle := out.take
				if !flood.ready {
					handle = func(resident.Frame) (bool, error) { return false, nil } // as before the first message
				}
				began = time.Now()
				if _, err := c.read(t.Context(), handle); !errors.Is(err, errDied) {
					t.Fatal(err)
				}
				reads := (len(flood.said) + readSize - 1) / readSize
				if got, want := int(time.Since(began)/each), reads+(flood.work-c.pace.work)/messagesPerRead; got != want {
					t.Errorf("%d bytes and %d events, read as fast as %d reads, want %d", len(flood.said), events, got, want)
				}
				if last := messagesPerRead + readSize + readSize/len(result)*messageWork; c.pace.work > last {
					t.Errorf("work of %d bytes is owed, more than that of a read", c.pace.work)
				}
			})
		})
	}
}
