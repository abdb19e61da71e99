package egress

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/sandboxd/sandboxd/internal/secrets"
	"github.com/sandboxd/sandboxd/internal/unixmsg"
	"github.com/sandboxd/sandboxd/netns/gateway"
	"github.com/sandboxd/sandboxd/netns/policy"
)

// Argument is the only argument of the daemon's program when it runs as a gateway.
const Argument = "gateway"

// fdSocket is the gateway's end of the socket pair.
const fdSocket = 3

const (
	// MaxPolicy is the longest policy document, in bytes: it fits into one packet.
	MaxPolicy = 64 << 10

	maxID      = 128
	maxError   = 1024
	maxName    = 253
	maxMethod  = 64
	maxPath    = 1024
	maxRule    = 256
	maxReason  = 512
	maxProcess = 64 // name of a process, and the ids beside it
	maxPID     = 1 << 22
	maxNotes   = 8 // missing restrictions of a hello

	// MaxJoined is the maximum number of named networks that one sandbox joins.
	MaxJoined = 8
	maxLabel  = 63
	maxReset  = 1024 // peers of one request

	maxAuthority = 4 << 10
	maxSecrets   = 24 << 10 // all of one network
)

// The packets of both directions. Base64 makes a policy a third longer, and escapes make a byte of
// text up to six.
var (
	requests = unixmsg.Format{MaxBytes: 160 << 10, MaxFiles: 3}
	messages = unixmsg.Format{MaxBytes: 16 << 10}
	// Those of the socket for asks.
	askPackets   = unixmsg.Format{MaxBytes: 4 << 10}
	replyPackets = unixmsg.Format{MaxBytes: 8 << 10, MaxFiles: 1}
)

// A request is a packet to the gateway. One of its pointers is set, or Report, or Asks.
type request struct {
	Number    uint64     `json:"number"` // of the answer; counts up
	Add       *add       `json:"add,omitempty"`
	SetPolicy *setPolicy `json:"set_policy,omitempty"`
	// SetSecrets replaces the secrets of a network.
	SetSecrets *setSecrets `json:"set_secrets,omitempty"`
	// SetNetworks replaces the named networks that a sandbox is in.
	SetNetworks *setNetworks `json:"set_networks,omitempty"`
	// ResetPeers resets the connections of a network to peers.
	ResetPeers *resetPeers `json:"reset_peers,omitempty"`
	Remove     *remove     `json:"remove,omitempty"`
	// Report asks the process to write the report of its crash to the file. It has no answer.
	Report bool `json:"report,omitempty"`
	// Asks gives the process the socket for asks. It has no answer.
	Asks bool `json:"asks,omitempty"`
}

// add adds a network, or replaces it. Its files are Stream, DNS and DNSTCP.
type add struct {
	ID     string         `json:"id"`
	Policy []byte         `json:"policy"`
	Budget gateway.Budget `json:"budget"`
	Spent  gateway.Spent  `json:"spent,omitzero"` // by processes before
	// Certificate and Key are of the authority for inspection; both are empty or neither.
	Certificate []byte           `json:"certificate,omitempty"`
	Key         []byte           `json:"key,omitempty"`
	Secrets     []secrets.Secret `json:"secrets,omitempty"`
	// Networks are the named networks that the sandbox is in.
	Networks []string `json:"networks,omitempty"`
	// Quarantined makes the process refuse everything unread.
	Quarantined bool `json:"quarantined,omitempty"`
}

type setPolicy struct {
	ID     string `json:"id"`
	Policy []byte `json:"policy"`
}

type setNetworks struct {
	ID       string   `json:"id"`
	Networks []string `json:"networks"`
}

// resetPeers names the peers by their addresses.
type resetPeers struct {
	ID    string       `json:"id"`
	Peers []netip.Addr `json:"peers"`
}

type remove struct {
	ID string `json:"id"`
}

// reply is the daemon's reply to an ask. Its file is the connection, if the ask was for one and the
// error is empty.
type reply struct {
	Number uint64 `json:"number"`           // of the ask
	Peer   *peer  `json:"peer,omitempty"`   // nil if there is none, a bound refuses, or the ask was for a socket
	Socket bool   `json:"socket,omitempty"` // the file is a connection to a socket of the host
	// Process is the one that was asked for; nil if it is not known.
	Process *holder `json:"process,omitempty"`
	Error   string  `json:"error,omitempty"`
}

// peer is a [gateway.Peer] on the wire.
type peer struct {
	Name    string     `json:"name"`
	Network string     `json:"network"`
	Addr    netip.Addr `json:"addr"`
}

// holder is a [gateway.Process] on the wire.
type holder struct {
	PID     int    `json:"pid"`
	Name    string `json:"name"`
	Exec    string `json:"exec,omitempty"`
	Sandbox string `json:"sandbox,omitempty"`
}

// check reports a process that no daemon and no gateway of ours sends.
func (h *holder) check() error {
	if h.PID < 1 || h.PID > maxPID || !isClean(h.Name, maxProcess) || !isClean(h.Exec, maxProcess) || !isClean(h.Sandbox, maxProcess) {
		return errors.New("malformed process")
	}
	return nil
}

// holderOf returns the wire's form of a process, within the bounds of check.
func holderOf(p *gateway.Process) *holder {
	if p == nil {
		return nil
	}
	return &holder{min(max(1, p.PID), maxPID), clean(p.Name, maxProcess), clean(p.Exec, maxProcess), clean(p.Sandbox, maxProcess)}
}

// ends are [gateway.Ends] on the wire.
type ends struct {
	Protocol string         `json:"protocol"`
	Program  netip.AddrPort `json:"program"`
	Server   netip.AddrPort `json:"server"`
}

// A message is a packet from the gateway. One of its pointers is set, or there are events.
type message struct {
	Hello  *hello  `json:"hello,omitempty"`
	Answer *answer `json:"answer,omitempty"`
	Events []event `json:"events,omitempty"`
}

// ask asks the daemon for the peer with a name, for a connection to the one with an address, for a
// connection to the service of the host with a port that the policy has at a Unix socket, or for
// the process that has an end of a connection. It goes through a socket of its own, where it waits
// behind no event.
type ask struct {
	Number  uint64         `json:"number"`  // of the reply; counts up
	Network string         `json:"network"` // id of the network that asks
	Name    string         `json:"name,omitempty"`
	Dial    netip.AddrPort `json:"dial,omitzero"`
	Socket  uint16         `json:"socket,omitempty"` // port of the service
	Process *ends          `json:"process,omitempty"`
}

// hello is the first message, sent when the gateway is confined.
type hello struct {
	Landlock int      `json:"landlock"` // version; 0 if none is enforced
	Missing  []string `json:"missing,omitempty"`
	Networks int      `json:"networks"` // bound, by the limit of descriptors
}

type answer struct {
	Number uint64 `json:"number"`
	Error  string `json:"error,omitempty"`
}

// event is a [gateway.Event] on the wire.
type event struct {
	Network  string       `json:"network"`
	Kind     gateway.Kind `json:"kind"`
	Time     int64        `json:"time"`     // ns since 1970
	Duration int64        `json:"duration"` // ns
	Protocol string       `json:"protocol,omitempty"`
	Name     string       `json:"name,omitempty"`
	Addr     netip.Addr   `json:"addr"`
	Port     uint16       `json:"port,omitempty"`
	Method   string       `json:"method,omitempty"`
	Path     string       `json:"path,omitempty"`
	Status   int          `json:"status,omitempty"`
	Allow    bool         `json:"allow,omitempty"`
	Rule     string       `json:"rule,omitempty"`
	Secret   string       `json:"secret,omitempty"`
	Reason   string       `json:"reason,omitempty"`
	Out      int64        `json:"out,omitempty"`
	In       int64        `json:"in,omitempty"`
	Lost     uint64       `json:"lost,omitempty"`
	Process  *holder      `json:"process,omitempty"`

	Spent *gateway.Spent `json:"spent,omitempty"`
}

// toWire returns an event within the bounds that [event.event] checks.
func toWire(e gateway.Event) *event {
	return &event{
		Network: e.Network, Kind: e.Kind, Time: e.Time.UnixNano(), Duration: max(0, int64(e.Duration)),
		Protocol: e.Protocol, Name: wellFormed(e.Name), Secret: clean(e.Secret, maxRule), Addr: e.Addr.WithZone(""), Port: e.Port,
		Method: clean(e.Method, maxMethod), Path: clean(e.Path, maxPath), Status: min(max(0, e.Status), maxStatus), Allow: e.Allow,
		Rule: clean(e.Rule, maxRule), Reason: clean(e.Reason, maxReason), Out: max(0, e.Out), In: max(0, e.In), Lost: e.Lost, Spent: e.Spent,
		Process: holderOf(e.Process),
	}
}

// eventPackets returns messages with events, as many in each as fit.
func eventPackets(all []gateway.Event) (packets [][]byte) {
	const begin, end = `{"events":[`, `]}`
	packet := []byte(begin)
	for _, e := range all {
		one, err := encode(toWire(e))
		if err != nil {
			continue // it never fails: every value has a form in JSON
		}
		one = bytes.TrimSpace(one)
		if len(packet) > len(begin) && len(packet)+len(one)+len(",")+len(end) > messages.MaxBytes {
			packets = append(packets, append(packet, end...))
			packet = []byte(begin)
		}
		if len(packet) > len(begin) {
			packet = append(packet, ',')
		}
		packet = append(packet, one...)
	}
	if len(packet) > len(begin) {
		packets = append(packets, append(packet, end...))
	}
	return packets
}

// wellFormed returns "" for a text that is not a name: a sandbox must not make the daemon take this
// gateway for one that was taken over.
func wellFormed(name string) string {
	if _, err := policy.ParseName(name); err != nil {
		return ""
	}
	return name
}

const maxStatus = 999

// clean returns text as valid UTF-8 without control characters and with at most limit bytes.
func clean(text string, limit int) string {
	if isClean(text, limit) {
		return text
	}
	var b strings.Builder
	for _, r := range text {
		if unicode.IsControl(r) {
			r = utf8.RuneError
		}
		if b.Len()+utf8.RuneLen(r) > limit {
			break
		}
		b.WriteRune(r)
	}
	return b.String()
}

// isClean reports whether clean would change nothing.
func isClean(text string, limit int) bool {
	return len(text) <= limit && utf8.ValidString(text) && !strings.ContainsFunc(text, unicode.IsControl)
}

// event returns the event of a gateway that may have been taken over.
func (e *event) event() (gateway.Event, error) {
	bad := func(field string) (gateway.Event, error) {
		return gateway.Event{}, fmt.Errorf("event with a malformed %s", field)
	}
	switch e.Kind {
	case gateway.Connection, gateway.Request, gateway.Query:
	default:
		return bad("kind")
	}
	switch e.Protocol {
	case "tcp", "tls", "http", "https", "h2", "websocket", "dns":
	default:
		return bad("protocol")
	}
	if e.Name != "" {
		if _, err := policy.ParseName(e.Name); err != nil {
			return bad("name")
		}
	}
	for _, s := range []struct {
		field, text string
		limit       int
	}{{"method", e.Method, maxMethod}, {"path", e.Path, maxPath}, {"rule", e.Rule, maxRule}, {"secret", e.Secret, maxRule}, {"reason", e.Reason, maxReason}} {
		if !isClean(s.text, s.limit) {
			return bad(s.field)
		}
	}
	for field, n := range map[string]int64{"duration": e.Duration, "count of bytes": min(e.Out, e.In), "status": int64(min(e.Status, maxStatus-e.Status))} {
		if n < 0 {
			return bad(field)
		}
	}
	if e.Addr.Zone() != "" {
		return bad("address")
	}
	if e.Spent != nil && !plausible(e.Spent, gateway.MaxFresh, gateway.MaxRuleSpent) {
		return bad("use of the budget")
	}
	if e.Process != nil && e.Process.check() != nil {
		return bad("process")
	}
	return gateway.Event{
		Process: (*gateway.Process)(e.Process),
		Network: e.Network, Kind: e.Kind, Time: time.Unix(0, e.Time), Duration: time.Duration(e.Duration), Protocol: e.Protocol, Name: e.Name, Addr: e.Addr, Port: e.Port,
		Method: e.Method, Path: e.Path, Status: e.Status, Allow: e.Allow, Rule: e.Rule, Secret: e.Secret, Reason: e.Reason, Out: e.Out, In: e.In, Lost: e.Lost, Spent: e.Spent,
	}, nil
}

// plausible reports whether all values are within their bounds, and there are at most so many known
// hosts, of each rule too, and rules.
func plausible(s *gateway.Spent, known, rules int) bool {
	for i := range s.Rules {
		r := &s.Rules[i]
		if r.Rule == "" || !isClean(r.Rule, maxRule) || !areHosts(r.Known, known) || !areCounts(r.BytesOut, r.BytesIn, r.Connections, r.Hosts) {
			return false
		}
	}
	return len(s.Rules) <= rules && areHosts(s.Known, known) && areCounts(s.BytesOut, s.BytesIn, s.Connections, s.Queries, s.NameBytes, s.Hosts)
}

func areCounts(all ...int64) bool {
	return slices.Min(all) >= 0 && slices.Max(all) <= gateway.MaxSpent
}

// areHosts reports whether all are names or addresses, in the form in which a gateway has them.
func areHosts(all []string, most int) bool {
	return len(all) <= most && !slices.ContainsFunc(all, func(k string) bool {
		if addr, err := netip.ParseAddr(k); err == nil {
			return addr.Zone() != "" || addr.String() != k
		}
		name, err := policy.ParseName(k)
		return err != nil || name.String() != k
	})
}

// check reports a message that has no single kind, or text over its bound.
func (m *message) check() error {
	kinds := 0
	for _, set := range []bool{m.Hello != nil, m.Answer != nil, len(m.Events) > 0} {
		if set {
			kinds++
		}
	}
	switch {
	case kinds != 1:
		return errors.New("message of no kind or several")
	case m.Hello != nil:
		if len(m.Hello.Missing) > maxNotes || m.Hello.Landlock < 0 || m.Hello.Networks < 0 {
			return errors.New("malformed hello")
		}
		for _, note := range m.Hello.Missing {
			if !isClean(note, maxReason) {
				return errors.New("malformed hello")
			}
		}
	case m.Answer != nil && !isClean(m.Answer.Error, maxError):
		return errors.New("malformed answer")
	}
	return nil
}

// check reports an ask that no gateway of ours sends.
func (a *ask) check() error {
	if err := checkID(a.Network); err != nil {
		return fmt.Errorf("malformed ask: %w", err)
	}
	if p := a.Process; p != nil {
		if p.Protocol != "tcp" && p.Protocol != "udp" || !isEnd(p.Program) || !isEnd(p.Server) || a.Name != "" || a.Dial != (netip.AddrPort{}) || a.Socket != 0 {
			return errors.New("malformed ask")
		}
		return nil
	}
	if a.Name != "" {
		if name, err := policy.ParsePeerName(a.Name); err != nil || name.String() != a.Name || a.Dial != (netip.AddrPort{}) || a.Socket != 0 {
			return errors.New("malformed ask")
		}
		return nil
	}
	if a.Socket != 0 {
		if a.Dial != (netip.AddrPort{}) {
			return errors.New("malformed ask")
		}
		return nil
	}
	if !policy.PeerAddresses.Contains(a.Dial.Addr()) || a.Dial.Port() == 0 {
		return errors.New("malformed ask")
	}
	return nil
}

// isEnd reports whether an address is one of a socket.
func isEnd(a netip.AddrPort) bool { return a.IsValid() && a.Addr().Zone() == "" }

// check reports a reply that no daemon of ours sends.
func (r *reply) check(files int) error {
	if r.Process != nil && (files > 0 || r.Peer != nil || r.Socket || r.Error != "") {
		return errors.New("malformed reply")
	}
	switch {
	case r.Process != nil:
		return r.Process.check()
	case files > 1, files == 1 && (r.Peer == nil && !r.Socket || r.Error != ""), r.Socket && (r.Peer != nil || files == 0), !isClean(r.Error, maxError):
		return errors.New("malformed reply")
	case r.Peer != nil && (!isClean(r.Peer.Name, maxName) || !isClean(r.Peer.Network, maxLabel) || !policy.PeerAddresses.Contains(r.Peer.Addr)):
		return errors.New("malformed reply")
	}
	return nil
}

// id returns the network that a request is about, or "".
func (r *request) id() string {
	switch {
	case r.Add != nil:
		return r.Add.ID
	case r.SetPolicy != nil:
		return r.SetPolicy.ID
	case r.SetSecrets != nil:
		return r.SetSecrets.ID
	case r.SetNetworks != nil:
		return r.SetNetworks.ID
	case r.ResetPeers != nil:
		return r.ResetPeers.ID
	case r.Remove != nil:
		return r.Remove.ID
	}
	return ""
}

// check reports a request that no daemon of ours sends. The policy is parsed elsewhere.
func (r *request) check(files int) error {
	kinds, want := 0, 0
	id := "process" // of requests that are about no network
	var doc []byte
	var placed []secrets.Secret
	if r.Add != nil {
		kinds, want, id, doc, placed = kinds+1, 3, r.Add.ID, r.Add.Policy, r.Add.Secrets
		b := r.Add.Budget
		for _, n := range []float64{float64(b.BytesOut), float64(b.BytesIn), float64(b.Connections), float64(b.Hosts), float64(b.Queries), float64(b.NameBytes), b.ConnectionRate, b.QueryRate} {
			if n < 0 || math.IsNaN(n) || math.IsInf(n, 0) {
				return fmt.Errorf("budget of %v", n)
			}
		}
		if !plausible(&r.Add.Spent, gateway.MaxKnown, policy.MaxBudgets) {
			return errors.New("malformed use of the budget")
		}
	}
	if r.SetPolicy != nil {
		kinds, id, doc = kinds+1, r.SetPolicy.ID, r.SetPolicy.Policy
	}
	if r.SetSecrets != nil {
		kinds, id, placed = kinds+1, r.SetSecrets.ID, r.SetSecrets.Secrets
	}
	var joined []string
	if r.SetNetworks != nil {
		kinds, id, joined = kinds+1, r.SetNetworks.ID, r.SetNetworks.Networks
	}
	if r.Add != nil {
		joined = r.Add.Networks
	}
	if r.ResetPeers != nil {
		kinds, id = kinds+1, r.ResetPeers.ID
		if n := len(r.ResetPeers.Peers); n == 0 || n > maxReset {
			return fmt.Errorf("%d peers, want 1 to %d", n, maxReset)
		}
		for _, addr := range r.ResetPeers.Peers {
			if !policy.PeerAddresses.Contains(addr) {
				return fmt.Errorf("%s is the address of no peer", addr)
			}
		}
	}
	if r.Remove != nil {
		kinds, id = kinds+1, r.Remove.ID
	}
	for _, set := range []bool{r.Report, r.Asks} {
		if set {
			kinds, want = kinds+1, 1
		}
	}
	switch {
	case kinds != 1:
		return errors.New("request of no kind or several")
	case files != want:
		return fmt.Errorf("request with %d files, want %d", files, want)
	case r.Add != nil && len(r.Add.Certificate)+len(r.Add.Key) > maxAuthority:
		return errors.New("certificate authority is too large")
	case secretBytes(placed) > maxSecrets:
		return fmt.Errorf("secrets of more than %d bytes", maxSecrets)
	case !areLabels(joined):
		return fmt.Errorf("malformed named networks %.200q", joined)
	case len(doc) > MaxPolicy:
		return fmt.Errorf("policy of %d bytes, at most %d", len(doc), MaxPolicy)
	}
	return checkID(id)
}

// areLabels reports whether the names of named networks are few and short.
func areLabels(names []string) bool {
	return len(names) <= MaxJoined && !slices.ContainsFunc(names, func(n string) bool { return n == "" || !isClean(n, maxLabel) })
}

// secretBytes returns the size of secrets in a packet, roughly.
func secretBytes(all []secrets.Secret) (n int) {
	for i := range all {
		s := &all[i]
		n += 256 + len(s.Name) + len(s.Value) + len(s.Token) + len(s.Field) + len(s.Binding.Host)
		for _, p := range slices.Concat(s.Binding.Methods, s.Binding.Paths) {
			n += 4 + len(p)
		}
	}
	return n
}

func checkID(id string) error {
	if id == "" || !isClean(id, maxID) {
		return fmt.Errorf("malformed network id %.40q", id)
	}
	return nil
}

// decode decodes a packet that is exactly one value without unknown fields.
func decode(packet []byte, v any) error {
	d := json.NewDecoder(bytes.NewReader(packet))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return fmt.Errorf("decode packet: %w", err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("decode packet: bytes after the value")
	}
	return nil
}

// encode is the reverse of decode. It does not escape for HTML, which would make text longer.
func encode(v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return nil, fmt.Errorf("encode packet: %w", err)
	}
	return b.Bytes(), nil
}

// unixConn returns the connection of a socket's file, and closes the file.
func unixConn(f *os.File) (*net.UnixConn, error) {
	conn, err := net.FileConn(f)
	if err := errors.Join(err, f.Close()); err != nil {
		return nil, err
	}
	c, ok := conn.(*net.UnixConn)
	if !ok {
		return nil, errors.Join(fmt.Errorf("%T is no Unix socket", conn), conn.Close())
	}
	return c, nil
}
