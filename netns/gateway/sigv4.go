package gateway

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/netns/gateway/sniff"
)

const (
	sigv4Algorithm = "AWS4-HMAC-SHA256"
	emptyHash      = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855" // SHA-256 of nothing
)

// AWS signs requests with Signature Version 4. The sandbox has the placeholder as its access key id
// and any secret key: what the client signed is signed again. The session token is empty for keys
// without one.
//
// A request with a body must have its hash in x-amz-content-sha256, as clients of S3 send it, because
// no body is held back. A body that is signed chunk by chunk and a signature in the URL are refused.
func AWS(accessKeyID, secretKey, sessionToken string) Credential {
	err := checkSecret(secretKey, "a secret key")
	if accessKeyID == "" || strings.Trim(accessKeyID, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789") != "" {
		err = errors.New("the access key id is no word of letters and digits")
	}
	values := []string{secretKey}
	if sessionToken != "" {
		err = errors.Join(err, checkSecret(sessionToken, "a session token"))
		values = append(values, sessionToken)
	}
	return Credential{
		field: "authorization", err: err,
		sign: func(q *sniff.Request, placeholder string) ([]sniff.Field, error) {
			return signV4(q, placeholder, accessKeyID, secretKey, sessionToken)
		},
		values: func() []string { return values },
	}
}

// signV4 returns the fields of a request that a signature with another key changes. It returns none
// if the placeholder is not its access key id.
func signV4(q *sniff.Request, placeholder, id, key, token string) ([]sniff.Field, error) {
	fields := make(map[string][]string)
	for _, f := range q.Fields {
		fields[f.Name] = append(fields[f.Name], f.Value)
	}
	sent, ok := parseSigV4(fields["authorization"][0])
	if !ok || sent.id != placeholder {
		return nil, nil
	}
	var changed []sniff.Field
	fields["host"] = []string{q.Host.String()}
	switch {
	case token != "":
		fields["x-amz-security-token"] = []string{token}
		changed = append(changed, sniff.Field{Name: "x-amz-security-token", Value: token})
		if !slices.Contains(sent.signed, "x-amz-security-token") {
			sent.signed = append(sent.signed, "x-amz-security-token")
			slices.Sort(sent.signed)
		}
	case len(fields["x-amz-security-token"]) > 0:
		return nil, errors.New("the request has a session token, and the secret none")
	}
	date := fields["x-amz-date"]
	if len(date) != 1 || !strings.HasPrefix(date[0], sent.scope[0]+"T") {
		return nil, errors.New("the request to sign has no x-amz-date of the day of its scope")
	}
	hash, err := payloadHash(q, fields["x-amz-content-sha256"])
	if err != nil {
		return nil, err
	}
	canonical, err := canonicalRequest(q, sent, fields, hash)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256([]byte(canonical))
	scope := strings.Join(sent.scope[:], "/")
	mac := []byte("AWS4" + key)
	for _, part := range append(sent.scope[:], sigv4Algorithm+"\n"+date[0]+"\n"+scope+"\n"+hex.EncodeToString(sum[:])) {
		h := hmac.New(sha256.New, mac)
		h.Write([]byte(part))
		mac = h.Sum(nil)
	}
	return append(changed, sniff.Field{Name: "authorization", Value: fmt.Sprintf("%s Credential=%s/%s, SignedHeaders=%s, Signature=%x",
		sigv4Algorithm, id, scope, strings.Join(sent.signed, ";"), mac)}), nil
}

// A sigV4 is an Authorization field without its signature.
type sigV4 struct {
	id     string
	scope  [4]string // date, region, service, "aws4_request"
	signed []string
}

func parseSigV4(value string) (s sigV4, ok bool) {
	rest, ok := strings.CutPrefix(value, sigv4Algorithm+" ")
	if !ok {
		return s, false
	}
	parts := make(map[string]string)
	for part := range strings.SplitSeq(rest, ",") {
		name, value, _ := strings.Cut(strings.TrimSpace(part), "=")
		parts[name] = value
	}
	credential := strings.Split(parts["Credential"], "/")
	if len(credential) != 5 || credential[4] != "aws4_request" || len(parts) != 3 || parts["Signature"] == "" {
		return s, false
	}
	s.id, s.scope, s.signed = credential[0], [4]string(credential[1:]), strings.Split(parts["SignedHeaders"], ";")
	return s, slices.Contains(s.signed, "host") && slices.IsSorted(s.signed)
}

func payloadHash(q *sniff.Request, sent []string) (string, error) {
	empty := q.Body == sniff.Body{}
	switch {
	case len(sent) == 0 && empty:
		return emptyHash, nil
	case len(sent) == 0:
		return "", errors.New("the request to sign has a body without its hash in x-amz-content-sha256")
	case len(sent) > 1:
		return "", errors.New("the request to sign has the field x-amz-content-sha256 twice")
	case sent[0] == "UNSIGNED-PAYLOAD" || sent[0] == "STREAMING-UNSIGNED-PAYLOAD-TRAILER" || len(sent[0]) == len(emptyHash) && strings.Trim(sent[0], "0123456789abcdef") == "":
		return sent[0], nil
	default:
		return "", errors.New("the body of the request to sign is signed in parts, which cannot be signed again")
	}
}

func canonicalRequest(q *sniff.Request, s sigV4, fields map[string][]string, hash string) (string, error) {
	path, query, _ := strings.Cut(q.Target, "?")
	if s.scope[2] == "s3" { // of which the path is encoded once, not twice
		plain, err := url.PathUnescape(path)
		if err != nil {
			return "", errors.New("the path of the request to sign cannot be decoded")
		}
		path = plain
	}
	parameters, err := canonicalQuery(query)
	if err != nil {
		return "", err
	}
	lines := []string{q.Method, awsEncode(path, true), parameters}
	for _, name := range s.signed {
		values := slices.Clone(fields[name])
		if len(values) == 0 {
			return "", fmt.Errorf("the request to sign has no field %q, which it signs", name)
		}
		for i, v := range values {
			values[i] = strings.Join(strings.Fields(v), " ")
		}
		lines = append(lines, name+":"+strings.Join(values, ","))
	}
	return strings.Join(append(lines, "", strings.Join(s.signed, ";"), hash), "\n"), nil
}

func canonicalQuery(query string) (string, error) {
	if query == "" {
		return "", nil
	}
	var all [][2]string
	for part := range strings.SplitSeq(query, "&") {
		name, value, _ := strings.Cut(part, "=")
		n, err1 := url.PathUnescape(name)
		v, err2 := url.PathUnescape(value)
		if err1 != nil || err2 != nil || strings.Contains(part, "+") {
			return "", errors.New("the query of the request to sign can be read in two ways")
		}
		all = append(all, [2]string{awsEncode(n, false), awsEncode(v, false)})
	}
	slices.SortFunc(all, func(a, b [2]string) int { return slices.Compare(a[:], b[:]) })
	var b strings.Builder
	for _, p := range all {
		b.WriteString("&" + p[0] + "=" + p[1])
	}
	return b.String()[1:], nil
}

// awsEncode encodes all bytes but those that RFC 3986 does not reserve.
func awsEncode(s string, slashes bool) string {
	var b strings.Builder
	for i := range len(s) {
		c := s[i]
		if 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || strings.IndexByte("-._~", c) >= 0 || slashes && c == '/' {
			b.WriteByte(c)
		} else {
			fmt.Fprintf(&b, "%%%02X", c)
		}
	}
	return b.String()
}
