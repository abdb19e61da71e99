package egress

import (
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// A crash of the process is a panic in some goroutine, or an error of Go's runtime. Each goroutine
// that works for a network has the network's id as a label. Goroutines that it starts inherit the
// label, those of libraries too. The runtime's report of the crash has the labels. It goes through
// a pipe to the daemon, where it can be read after the end of the process.

const (
	// maxCrashes is the number of crashes after which a network is served no more, if there is less
	// than crashWindow between them.
	maxCrashes  = 3
	crashWindow = time.Hour
	// maxReport is the part of a report that is read: the goroutine that crashed comes first.
	maxReport = 64 << 10

	labelNetwork = "network"
)

// reportCrashes makes the runtime write the report of a crash to a file, with labels.
func reportCrashes(to *os.File) error {
	err := os.Setenv("GODEBUG", "tracebacklabels=1") // which the runtime notices
	if err == nil {
		err = debug.SetCrashOutput(to, debug.CrashOptions{})
	}
	if err == nil {
		// A report that is longer than the pipe must not hold up the end of the process.
		err = unix.SetNonblock(int(to.Fd()), true)
	}
	if err != nil {
		return fmt.Errorf("ask for reports of crashes: %w", err)
	}
	return nil
}

// askForReport gives the process the pipe for its report.
func (c *conn) askForReport() error {
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		return fmt.Errorf("make a pipe for the report of a crash: %w", err)
	}
	c.report = p[0]
	packet, err := encode(&request{Report: true})
	if err == nil {
		err = requests.Send(c.raw, packet, p[1])
	}
	return errors.Join(err, unix.Close(p[1]))
}

// blamed returns the network whose goroutine has crashed the process, or "". It is called once,
// after the end of the connection.
func (c *conn) blamed() string {
	if c.report < 0 {
		return ""
	}
	defer unix.Close(c.report)
	report := make([]byte, 0, maxReport)
	for len(report) < maxReport {
		n, err := unix.Read(c.report, report[len(report):maxReport])
		if n <= 0 || err != nil { // EAGAIN if the process lives
			break
		}
		report = report[:len(report)+n]
	}
	return crashed(string(report))
}

// causes are the beginnings of reports of crashes that the code of a network caused. Other crashes
// come from the host: memory or a thread could not be had while some network was served.
var causes = []string{"panic: ", "fatal error: concurrent map", "runtime: goroutine stack exceeds"}

// crashed returns the network of the first goroutine in a report. Values of a panic have a tab in
// front of each of their further lines, so that they name no goroutine.
func crashed(report string) string {
	if !slices.ContainsFunc(causes, func(c string) bool { return strings.HasPrefix(report, c) }) {
		return ""
	}
	for line := range strings.Lines(report) {
		if !strings.HasPrefix(line, "goroutine ") {
			continue
		}
		_, labels, _ := strings.Cut(line, ` labels:{"`+labelNetwork+`": `)
		quoted, err := strconv.QuotedPrefix(labels)
		if err != nil {
			return ""
		}
		id, err := strconv.Unquote(quoted)
		if err != nil {
			return ""
		}
		return id
	}
	return ""
}

// blame counts a crash against the network that caused it. It returns the network's id and the text
// for its record. A process that was taken over may blame another network, whose connections it
// could refuse as well.
func (g *Gateway) blame(c *conn, at time.Time) (id, told string) {
	id = c.blamed()
	g.mu.Lock()
	n := g.networks[id]
	if n == nil {
		g.mu.Unlock()
		return "", ""
	}
	if at.Sub(n.crashed) >= crashWindow {
		n.crashes = 0
	}
	n.crashes++
	n.crashed = at
	n.quarantined = n.quarantined || n.crashes >= maxCrashes
	crashes, quarantined := n.crashes, n.quarantined
	g.mu.Unlock()
	if quarantined {
		g.cfg.Log.Error("a network has crashed the gateway too often: all its connections are refused until the sandbox is started again", "network", id, "crashes", crashes)
		return id, fmt.Sprintf("this network has crashed it %d times: all connections are refused until the sandbox is started again", crashes)
	}
	g.cfg.Log.Error("a network has crashed the gateway", "network", id, "crashes", crashes)
	return id, "this network has crashed it"
}
