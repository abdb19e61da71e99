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

// destination is the destination of a kernel's frames.
type destination int

const (
	toClient     destination = iota // a client that takes all
	toPoor                          // such a client, without memory for its results
	toFullAnswer                    // an answer that has room for output only
	toNone                          // the client has left
	toStart                         // the kernel is not ready
)

// Each read of a kernel that brings something which no client gets is paced, and each such message
// by its work. Output and results that a client gets cost nothing: the client paces them. The clock
// is the test's: the waits are counted as reads.
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
	large := frame(resident.KindPiece, `{"text":"`+piece[9:]) + strings.Repeat(frame(resident.KindPiece, piece), 39) + frame(resident.KindResult, `"}`)
	new(host.Pace).Wait(nil, 1) // measures the time of a read, for which it needs the machine's clock
	output := strings.Repeat(frame(resident.KindStdout, piece), 100)
	short := strings.Repeat(frame(resident.KindPiece, "{"), 1000)
	const largeWork = 40*(resident.MaxFrame+messageWork) + 2 + messageWork
	for _, flood := range []struct {
		name, language, stream, said string
		to                           destination
		paced                        bool // each read
		work                         int  // of messages that are paced
	}{
		{"results without memory", "python", "stdout", strings.Repeat(large, 3), toPoor, true, 3 * largeWork},
		{"results beyond the answer", "python", "stdout", strings.Repeat(frame(resident.KindResult, result), 4000), toFullAnswer, true, 4000 * (len(result) + messageWork)},
		{"large results beyond the answer", "python", "stdout", strings.Repeat(large, 3), toFullAnswer, true, 3 * largeWork},
		{"failures beyond the answer", "python", "stdout", strings.Repeat(frame(resident.KindError, failure), 4000), toFullAnswer, true, 4000 * (len(failure) + messageWork)},
		{"empty output", "python", "stdout", strings.Repeat(frame(resident.KindStdout, ""), 30_000), toClient, true, 0},
		{"stderr of its own", "python", "stderr", strings.Repeat("x", 5<<20), toClient, true, 0},
		{"output before it is ready", "bash", "stdout", strings.Repeat("x", 5<<20), toStart, true, 0},
		{"output of a run whose client has left", "python", "stdout", output, toNone, true, 0},
		{"results of a run whose client has left", "python", "stdout", strings.Repeat(frame(resident.KindResult, result), 4000), toNone, true, 4000 * (len(result) + messageWork)},
		{"beginnings of a run", "javascript", "stdout", strings.Repeat(marked(resident.KindBegan, ""), 4000), toClient, true, 4000 * messageWork},
		{"short pieces", "python", "stdout", short, toClient, false, 1000 * messageWork},
		{"output for a client", "python", "stdout", output, toClient, false, 0},
		{"results for a client", "python", "stdout", strings.Repeat(frame(resident.KindResult, result), 4000), toClient, false, 0},
		{"large results for a client", "python", "stdout", strings.Repeat(large, 3), toClient, false, 0},
		{"results between output for a client", "bash", "stdout", strings.Repeat("x"+marked(resident.KindResult, result), 4000), toClient, false, 0},
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
				c.output = l
				c.place.Run, c.place.Ready = 1, flood.to != toStart
				c.hold = l.Hold(0)
				if n, err := l.Take(flood.stream, func(file int) (int, error) { return unix.Write(file, []byte(flood.said)) }); err != nil || n != len(flood.said) {
					t.Fatalf("%d, %v", n, err)
				}
				l.Finish()

				c.pace.pace.Wait(ended, 1<<14) // its burst is used up
				began := time.Now()
				c.pace.pace.Wait(ended, 1)
				each := time.Since(began)

				memory := &resultHold{quota: resultsQuota()}
				if flood.to == toPoor {
					memory.quota = &share.Quota{}
				}
				events := 0
				out := &runEvents{hold: memory, reader: resident.Reader{Run: 1, Take: memory.take}, emit: func(e api.CodeEvent) error {
					if events++; flood.to == toFullAnswer && (e.Result != nil || e.Failure != nil) {
						memory.refuse()
					}
					return nil
				}}
				out.timedOut = func() bool { return false }
				handle := out.take
				switch flood.to {
				case toNone:
					handle = skipRun(1)
				case toStart:
					handle = func(resident.Frame) (frameUse, error) { return frameDropped, nil } // as before the first message
				case toClient, toPoor, toFullAnswer:
				}
				began = time.Now()
				if _, err := c.readUntil(t.Context(), ended, handle); !errors.Is(err, errDied) {
					t.Fatal(err)
				}
				reads := 0
				if flood.paced {
					reads = (len(flood.said) + readSize - 1) / readSize
				}
				if got, want := int(time.Since(began)/each), reads+(flood.work-c.pace.work)/messagesPerRead; got != want {
					t.Errorf("%d bytes and %d events, read as fast as %d reads, want %d", len(flood.said), events, got, want)
				}
				if c.pace.work >= messagesPerRead {
					t.Errorf("work of %d bytes is owed, more than that of a read", c.pace.work)
				}
			})
		})
	}
}

// The reads of a frame that comes in parts cost nothing if a client gets it, unless the parts are
// tiny. They are paced if it is dropped.
func TestPaceOfPartialFrames(t *testing.T) {
	f := resident.Frame{Kind: resident.KindStdout, Payload: make([]byte, resident.MaxFrame)}
	for _, of := range []struct {
		use         frameUse
		parts, want int
	}{
		{frameSent, readsPerFrame, 0},
		{frameSent, 1000, 1000 - readsPerFrame},
		{frameDropped, readsPerFrame, readsPerFrame + 1},
		{frameDropped, 1000, 1001},
	} {
		var p kernelPace
		for range of.parts {
			p.count()
		}
		p.took(f, of.use)
		p.count()
		if p.reads != of.want {
			t.Errorf("a frame in %d reads, used as %d: %d reads are paced, want %d", of.parts+1, of.use, p.reads, of.want)
		}
	}
}
