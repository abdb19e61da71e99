package bench

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/agent"
	"github.com/sandboxd/sandboxd/agent/llm"
	"github.com/sandboxd/sandboxd/api"
)

// LedgerName is the name of the record in a benchmark's directory.
const LedgerName = "bench.jsonl"

const ledgerVersion = 1

// event is a line of bench.jsonl. Exactly one of the pointers is set.
type event struct {
	V  int       `json:"v"`
	N  int       `json:"n"` // number of the line, from 1
	At time.Time `json:"at"`

	Begin    *Config   `json:"begin,omitempty"`
	Answered *Answered `json:"answered,omitempty"`
	Scored   *Scored   `json:"scored,omitempty"`
	Resumed  *struct{} `json:"resumed,omitempty"` // another process continues the benchmark
}

// Config holds the parameters of a benchmark. With the keys, they are sufficient to resume it.
type Config struct {
	ID            string         `json:"id"` // label of the sandboxes that score
	Mode          Mode           `json:"mode"`
	TaskDir       string         `json:"task_dir"`
	Data          string         `json:"data,omitempty"`
	Digest        string         `json:"digest"` // of the task
	Scoring       Method         `json:"scoring"`
	Start         int            `json:"start_id"`
	End           int            `json:"end_id"` // index after the last problem
	LLMName       string         `json:"llm_name"`
	BaseURL       string         `json:"llm_base_url,omitempty"`
	JudgeName     string         `json:"judge_model,omitempty"`
	JudgeURL      string         `json:"judge_base_url,omitempty"`
	Image         string         `json:"docker_image"`
	ScoreImage    string         `json:"score_image,omitempty"`
	Limits        api.Limits     `json:"limits,omitzero"`
	Network       api.Network    `json:"network,omitzero"` // of the runs; what scores has none
	MaxSteps      int            `json:"max_steps"`
	Temperature   *float64       `json:"temperature"`
	MaxTokenLimit int            `json:"max_token_limit"`
	MaxTokens     int            `json:"max_tokens_per_call"`
	MaxResponse   int            `json:"max_response_len"`
	ExtraBody     map[string]any `json:"extra_body"`
	SaveRequests  bool           `json:"save_litellm_response"`
	Budget        agent.Budget   `json:"budget"`           // of each problem; its turns and conversation are MaxSteps and MaxTokenLimit
	Policy        string         `json:"policy,omitempty"` // source text
	Prices        string         `json:"prices,omitempty"`
}

// Answered records the answer to a problem, or the failure to give one.
type Answered struct {
	Index      int              `json:"index"`
	ID         string           `json:"id"`
	Answer     string           `json:"answer"`
	Run        string           `json:"run,omitempty"` // directory of the run, relative to the benchmark's
	ExitReason agent.ExitReason `json:"exit_reason,omitempty"`
	Error      string           `json:"error,omitempty"` // reason for a score of 0, whatever the answer
	Steps      int              `json:"steps"`
	Usage      llm.Usage        `json:"usage"`
	Seconds    float64          `json:"seconds"`
	// Attempts is the number of runs; it exceeds one if a run could not be resumed.
	Attempts int `json:"attempts"`
}

// Scored records an answer's score.
type Scored struct {
	Index int       `json:"index"`
	Score float64   `json:"score"`
	Error string    `json:"error,omitempty"` // of the scoring
	Judge llm.Usage `json:"judge_usage,omitzero"`
}

// ledger is the open record and the state derived from it.
type ledger struct {
	file *os.File
	now  func() time.Time

	mu       sync.Mutex
	n        int
	begin    Config
	answered map[int]*Answered
	scored   map[int]*Scored
	worked   time.Duration // by earlier processes
	since    time.Time     // start of the last process
	last     time.Time
	broken   error
}

func createLedger(dir string, c Config, now func() time.Time) (*ledger, error) {
	f, err := os.OpenFile(filepath.Join(dir, LedgerName), os.O_RDWR|os.O_CREATE|os.O_EXCL|os.O_APPEND, 0o644) //nolint:gosec // readable by others, as the umask allows
	if err != nil {
		return nil, fmt.Errorf("begin the record: %w", err)
	}
	l := &ledger{file: f, now: now, answered: map[int]*Answered{}, scored: map[int]*Scored{}}
	err = l.lock()
	if err == nil {
		err = l.add(event{Begin: &c})
	}
	if err == nil {
		err = syncDir(dir)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("begin the record: %w", err), f.Close())
	}
	return l, nil
}

// openLedger opens a benchmark's record to continue it. It removes an incomplete last line.
func openLedger(dir string, now func() time.Time) (*ledger, error) {
	f, err := openFile(os.OpenFile, filepath.Join(dir, LedgerName), os.O_RDWR|os.O_APPEND)
	if err != nil {
		return nil, fmt.Errorf("open the record: %w", err)
	}
	l := &ledger{file: f, now: now, answered: map[int]*Answered{}, scored: map[int]*Scored{}}
	err = l.lock()
	if err == nil {
		var whole int64
		if whole, err = l.read(f); err == nil {
			err = f.Truncate(whole)
		}
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open the record in %s: %w", dir, err), f.Close())
	}
	return l, nil
}

// ReadConfig returns the parameters of the benchmark in dir.
func ReadConfig(dir string) (*Config, error) {
	f, err := openFile(os.OpenFile, filepath.Join(dir, LedgerName), os.O_RDONLY)
	if err != nil {
		return nil, fmt.Errorf("read the record: %w", err)
	}
	defer f.Close()
	l := &ledger{answered: map[int]*Answered{}, scored: map[int]*Scored{}}
	if _, err := l.read(f); err != nil {
		return nil, fmt.Errorf("read the record in %s: %w", dir, err)
	}
	return &l.begin, nil
}

// lock excludes other processes from the benchmark until this one ends.
func (l *ledger) lock() error {
	held := unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart}
	err := unix.FcntlFlock(l.file.Fd(), unix.F_OFD_SETLK, &held)
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
		return errors.New("another process is working on this benchmark")
	}
	return err
}

// read applies the complete lines and returns their total size.
func (l *ledger) read(r io.Reader) (whole int64, err error) {
	br := bufio.NewReaderSize(r, 1<<16)
	for {
		line, err := br.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			break // text behind the last newline is incomplete
		}
		if err != nil {
			return 0, err
		}
		var e event
		if err := json.Unmarshal(line, &e); err != nil {
			return 0, fmt.Errorf("line %d: %w", l.n+1, err)
		}
		if e.V != ledgerVersion || e.N != l.n+1 {
			return 0, fmt.Errorf("line %d: it says that it is number %d of version %d", l.n+1, e.N, e.V)
		}
		if err := l.apply(e); err != nil {
			return 0, fmt.Errorf("line %d: %w", e.N, err)
		}
		whole += int64(len(line))
	}
	if l.n == 0 {
		return 0, errors.New("it has no whole line: the benchmark had not begun")
	}
	return whole, nil
}

// apply adds an event to the state. An event out of order is an error.
func (l *ledger) apply(e event) error {
	switch {
	case (e.Begin != nil) != (l.n == 0):
		return errors.New("the beginning, and nothing else, stands in the first line")
	case e.Begin != nil:
		l.begin, l.since = *e.Begin, e.At
	case e.Answered != nil && e.Scored == nil:
		if l.answered[e.Answered.Index] != nil {
			return fmt.Errorf("problem %d is answered twice", e.Answered.Index)
		}
		l.answered[e.Answered.Index] = e.Answered
	case e.Scored != nil && e.Answered == nil:
		if l.answered[e.Scored.Index] == nil || l.scored[e.Scored.Index] != nil {
			return fmt.Errorf("problem %d is scored twice, or without an answer", e.Scored.Index)
		}
		if err := valid(e.Scored.Score); err != nil {
			return err
		}
		l.scored[e.Scored.Index] = e.Scored
	case e.Resumed != nil && e.Scored == nil && e.Answered == nil:
		l.worked += max(l.last.Sub(l.since), 0)
		l.since = e.At
	default:
		return errors.New("it is of no kind that this program knows")
	}
	l.n, l.last = e.N, e.At
	return nil
}

// add appends an event durably and applies it.
func (l *ledger) add(e event) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.broken != nil {
		return l.broken
	}
	e.V, e.N, e.At = ledgerVersion, l.n+1, l.now().UTC()
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false) // these files are for people
	err := enc.Encode(e)
	if err != nil {
		return fmt.Errorf("record: %w", err)
	}
	if _, err = l.file.Write(b.Bytes()); err == nil {
		err = unix.Fdatasync(int(l.file.Fd()))
	}
	if err != nil {
		l.broken = fmt.Errorf("record: %w", err) // a part of the line may have been written
		return l.broken
	}
	return l.apply(e)
}

// elapsed returns the working time of all processes, up to the last line.
func (l *ledger) elapsed() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.worked + max(l.last.Sub(l.since), 0)
}

// of returns the recorded state of a problem.
func (l *ledger) of(index int) (*Answered, *Scored) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.answered[index], l.scored[index]
}

func syncDir(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
