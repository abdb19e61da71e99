package mcp

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"mime"
	"net/http"
	"net/url"
	"path"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/sandboxd/sandboxd/api"
)

// Bounds of files, in bytes unless they say otherwise.
const (
	maxText     = 256 << 10 // of one answer of file_read
	maxImage    = 4 << 20
	maxWrite    = 4 << 20
	maxResource = 4 << 20
	maxEntries  = 1000 // number of entries of file_list
	maxDepth    = 5    // levels of file_list
)

type readIn struct {
	which

	Path   string `json:"path" jsonschema:"absolute, or relative to the sandbox's working directory"`
	Offset int64  `json:"offset,omitempty" jsonschema:"bytes to skip"`
	Length int64  `json:"length,omitempty" jsonschema:"bytes to read; default and maximum 262144"`
}

type readOut struct {
	Path   string `json:"path"`
	Type   string `json:"media_type"`
	Size   int64  `json:"size" jsonschema:"bytes of the whole file"`
	Offset int64  `json:"offset"`
	Length int64  `json:"length" jsonschema:"bytes in this answer"`
	More   bool   `json:"more,omitempty" jsonschema:"the file goes on after this answer"`
}

// file is a file's content, or a part of it.
type file struct {
	path string
	size int64
	data []byte
}

// load reads a part of a regular file, of at most length bytes.
func (c *call) load(ctx context.Context, b *box, name string, offset, length int64) (f file, err error) {
	if f.path, err = b.abs(name); err != nil {
		return f, err
	}
	_, err = c.se.awake(ctx, b, func() error {
		st, err := c.s.api.StatFile(ctx, b.id, f.path, true)
		if err != nil {
			return err
		}
		if st.Type != api.TypeFile {
			return fmt.Errorf("%s is a %s, no file", clip(f.path), st.Type)
		}
		if f.size, f.data = st.Size, nil; offset > 0 && offset >= f.size {
			return nil
		}
		r, err := c.s.api.ReadFileRange(ctx, b.id, f.path, offset, length)
		if st.Size == 0 { // a range needs a byte; files of /proc have content all the same
			r, err = c.s.api.ReadFile(ctx, b.id, f.path)
		}
		if err != nil {
			return err
		}
		defer r.Close()
		f.data, err = io.ReadAll(io.LimitReader(r, length))
		return err
	})
	f.size = max(f.size, offset+int64(len(f.data)))
	return f, err
}

// mediaType returns the media type of a file by its name and its first bytes.
func mediaType(name string, data []byte) string {
	found := http.DetectContentType(data)
	if strings.HasPrefix(found, "text/") || found == "application/octet-stream" {
		if byName := mime.TypeByExtension(path.Ext(name)); byName != "" && (strings.HasPrefix(byName, "text/") == utf8.Valid(data)) {
			return byName
		}
	}
	return found
}

// isImage reports whether clients show images of the type.
func isImage(typ string) bool {
	switch typ {
	case "image/png", "image/jpeg", "image/gif", "image/webp":
		return true
	}
	return false
}

func readFile(ctx context.Context, c *call, in readIn) (*mcp.CallToolResult, readOut, error) {
	var out readOut
	switch {
	case in.Offset < 0 || in.Length < 0 || in.Length > maxText:
		return nil, out, fmt.Errorf("offset and length are at least 0, and length is at most %d", maxText)
	case in.Length == 0:
		in.Length = maxText
	}
	b, err := c.se.sandbox(ctx, c, in.Sandbox)
	if err != nil {
		return nil, out, err
	}
	f, err := c.load(ctx, b, in.Path, in.Offset, in.Length)
	if err != nil {
		return nil, out, err
	}
	typ := mediaType(f.path, f.data)
	if isImage(typ) && in.Offset == 0 && f.size > int64(len(f.data)) && f.size <= maxImage {
		if f, err = c.load(ctx, b, in.Path, 0, maxImage); err != nil {
			return nil, out, err
		}
	}
	out = readOut{Path: f.path, Type: typ, Size: f.size, Offset: in.Offset, Length: int64(len(f.data))}
	out.More = out.Offset+out.Length < out.Size
	if isImage(typ) && in.Offset == 0 && !out.More {
		return &mcp.CallToolResult{Content: []mcp.Content{&mcp.ImageContent{Data: f.data, MIMEType: typ}}}, out, nil
	}
	text, ok := asText(f.data, out.More)
	if !ok {
		return nil, out, fmt.Errorf("%s is no text (%s, %d bytes); read it with a command, or as the resource %s", clip(f.path), typ, f.size, uri(b.id, f.path))
	}
	out.Length = int64(len(text))
	out.More = out.Offset+out.Length < out.Size
	if out.More {
		text += fmt.Sprintf("\n[the file has %d bytes; it goes on at offset %d]", out.Size, out.Offset+out.Length)
	}
	return &mcp.CallToolResult{Content: []mcp.Content{&mcp.TextContent{Text: text}}}, out, nil
}

// asText returns data as text, unless it is none. A character that a cut has torn is left out.
func asText(data []byte, cut bool) (string, bool) {
	if cut {
		for i := 1; i < utf8.UTFMax && i <= len(data); i++ {
			if utf8.RuneStart(data[len(data)-i]) {
				if !utf8.FullRune(data[len(data)-i:]) {
					data = data[:len(data)-i]
				}
				break
			}
		}
	}
	return string(data), utf8.Valid(data) && bytes.IndexByte(data, 0) < 0
}

type writeIn struct {
	which

	Path     string `json:"path" jsonschema:"absolute, or relative to the sandbox's working directory"`
	Content  string `json:"content" jsonschema:"whole content, or what is appended"`
	Encoding string `json:"encoding,omitempty" jsonschema:"encoding of content: utf8, the default, or base64"`
	Mode     string `json:"mode,omitempty" jsonschema:"permissions, such as 0755; default: 0644"`
	Append   bool   `json:"append,omitempty" jsonschema:"append to the file"`
}

type writeOut struct {
	Path  string `json:"path"`
	Bytes int64  `json:"bytes" jsonschema:"bytes written"`
}

func writeFile(ctx context.Context, c *call, in writeIn) (*mcp.CallToolResult, writeOut, error) {
	data := []byte(in.Content)
	switch in.Encoding {
	case "", "utf8", "utf-8", "text":
	case "base64":
		var err error
		if data, err = base64.StdEncoding.DecodeString(in.Content); err != nil {
			return nil, writeOut{}, fmt.Errorf("content is no base64: %w", err)
		}
	default:
		return nil, writeOut{}, fmt.Errorf("encoding %q: want utf8 or base64", clip(in.Encoding))
	}
	if len(data) > maxWrite {
		return nil, writeOut{}, fmt.Errorf("content has %d bytes, and %d at most; append the rest", len(data), maxWrite)
	}
	mode, err := permissions(in.Mode)
	if err != nil {
		return nil, writeOut{}, err
	}
	b, err := c.se.sandbox(ctx, c, in.Sandbox)
	if err != nil {
		return nil, writeOut{}, err
	}
	name, err := b.abs(in.Path)
	if err != nil {
		return nil, writeOut{}, err
	}
	_, err = c.se.awake(ctx, b, func() error {
		if in.Append {
			return c.s.api.AppendFile(ctx, b.id, name, bytes.NewReader(data), mode, "")
		}
		return c.s.api.WriteFile(ctx, b.id, name, bytes.NewReader(data), mode, "")
	})
	if err != nil {
		return nil, writeOut{}, err
	}
	return nil, writeOut{Path: name, Bytes: int64(len(data))}, nil
}

// permissions reads an octal mode; empty means the default.
func permissions(text string) (fs.FileMode, error) {
	if text == "" {
		return 0, nil
	}
	n, err := strconv.ParseUint(text, 8, 32)
	if err != nil || n == 0 || n > 0o777 {
		return 0, fmt.Errorf("mode %q: want octal permissions such as 0644", clip(text))
	}
	return fs.FileMode(n), nil
}

type editIn struct {
	which

	Path string `json:"path" jsonschema:"absolute, or relative to the sandbox's working directory"`
	Old  string `json:"old_text" jsonschema:"text that is replaced, exactly as it stands in the file"`
	New  string `json:"new_text" jsonschema:"text in its place"`
	All  bool   `json:"replace_all,omitempty" jsonschema:"replace every occurrence"`
}

type editOut struct {
	Path         string `json:"path"`
	Replacements int    `json:"replacements"`
}

// editFile replaces the file as a whole. Its owner and permissions stay.
func editFile(ctx context.Context, c *call, in editIn) (*mcp.CallToolResult, editOut, error) {
	out := editOut{}
	switch in.Old {
	case "":
		return nil, out, errors.New("old_text is empty")
	case in.New:
		return nil, out, errors.New("old_text and new_text are the same")
	}
	b, err := c.se.sandbox(ctx, c, in.Sandbox)
	if err != nil {
		return nil, out, err
	}
	f, err := c.load(ctx, b, in.Path, 0, maxWrite+1)
	if err != nil {
		return nil, out, err
	}
	if f.size > maxWrite {
		return nil, out, fmt.Errorf("%s has more than %d bytes; edit it with a command", clip(f.path), maxWrite)
	}
	text := string(f.data)
	out = editOut{Path: f.path, Replacements: strings.Count(text, in.Old)}
	switch {
	case out.Replacements == 0:
		return nil, out, fmt.Errorf("old_text does not occur in %s; read the file for its exact text", clip(f.path))
	case out.Replacements > 1 && !in.All:
		return nil, out, fmt.Errorf("old_text occurs %d times in %s; add lines around it, or give replace_all", out.Replacements, clip(f.path))
	}
	size := len(text) + out.Replacements*(len(in.New)-len(in.Old))
	if size > maxWrite {
		return nil, out, fmt.Errorf("the edited file would have %d bytes, and %d at most", size, maxWrite)
	}
	st, err := c.s.api.StatFile(ctx, b.id, f.path, true)
	if err != nil {
		return nil, out, err
	}
	mode, err := strconv.ParseUint(st.Mode, 8, 32)
	if err != nil {
		return nil, out, fmt.Errorf("mode %q: %w", clip(st.Mode), err)
	}
	owner := fmt.Sprintf("%d:%d", st.UID, st.GID)
	edited := strings.NewReader(strings.ReplaceAll(text, in.Old, in.New))
	return nil, out, c.s.api.WriteFile(ctx, b.id, st.Path, edited, fs.FileMode(mode)&0o777, owner)
}

type listIn struct {
	which

	Path  string `json:"path,omitempty" jsonschema:"directory; default: the sandbox's working directory"`
	Depth int    `json:"depth,omitempty" jsonschema:"levels, from 1, the default, to 5"`
}

type entryOut struct {
	Path   string `json:"path"`
	Type   string `json:"type"`
	Size   int64  `json:"size"`
	Mode   string `json:"mode"`
	Target string `json:"target,omitempty" jsonschema:"of a symbolic link"`
}

type entriesOut struct {
	Entries   []entryOut `json:"entries"`
	Truncated bool       `json:"truncated,omitempty" jsonschema:"there are more entries"`
}

func listFiles(ctx context.Context, c *call, in listIn) (*mcp.CallToolResult, entriesOut, error) {
	out := entriesOut{Entries: []entryOut{}}
	if in.Depth == 0 {
		in.Depth = 1
	}
	if in.Depth < 1 || in.Depth > maxDepth {
		return nil, out, fmt.Errorf("depth %d: want 1 to %d", in.Depth, maxDepth)
	}
	if in.Path == "" {
		in.Path = "."
	}
	b, err := c.se.sandbox(ctx, c, in.Sandbox)
	if err != nil {
		return nil, out, err
	}
	dir, err := b.abs(in.Path)
	if err != nil {
		return nil, out, err
	}
	var list *api.FileList
	_, err = c.se.awake(ctx, b, func() error {
		list, err = c.s.api.ListFiles(ctx, b.id, dir, in.Depth)
		return err
	})
	if err != nil {
		return nil, out, err
	}
	out.Truncated = list.More || len(list.Entries) > maxEntries
	for _, e := range list.Entries[:min(len(list.Entries), maxEntries)] {
		out.Entries = append(out.Entries, entryOut{Path: e.Path, Type: string(e.Type), Size: e.Size, Mode: e.Mode, Target: e.Target})
	}
	return nil, out, nil
}

// scheme begins the URI of each resource.
const scheme = "sandbox"

// uri returns the resource of a file.
func uri(sandbox, file string) string {
	return (&url.URL{Scheme: scheme, Host: sandbox, Path: file}).String()
}

func (s *Server) addResources() {
	// The SDK quotes the URI of an unknown resource in a way that is not always JSON. A message that
	// cannot be encoded would end the session.
	s.mcp.AddReceivingMiddleware(func(next mcp.MethodHandler) mcp.MethodHandler {
		return func(ctx context.Context, method string, req mcp.Request) (mcp.Result, error) {
			res, err := next(ctx, method, req)
			if rpc, ok := errors.AsType[*jsonrpc.Error](err); ok && len(rpc.Data) > 0 && !json.Valid(rpc.Data) {
				err = &jsonrpc.Error{Code: rpc.Code, Message: rpc.Message}
			}
			return res, err
		}
	})
	s.mcp.AddResourceTemplate(&mcp.ResourceTemplate{
		Name: "file", Title: "File of a sandbox", URITemplate: scheme + "://{sandbox}/{+path}",
		Description: "A file of a sandbox of this session, which {sandbox} names by its id or name, or as default. It has at most 4 MiB.",
	}, func(ctx context.Context, req *mcp.ReadResourceRequest) (*mcp.ReadResourceResult, error) {
		c, ctx, done, err := s.begin(ctx, req.Session, req.Params.GetProgressToken())
		if err != nil {
			return nil, err
		}
		defer done()
		res, err := readResource(ctx, c, req.Params.URI)
		if err != nil {
			return nil, s.explain(err)
		}
		return res, nil
	})
}

func readResource(ctx context.Context, c *call, name string) (*mcp.ReadResourceResult, error) {
	u, err := url.Parse(name)
	if err != nil || u.Scheme != scheme || u.Host == "" || u.Path == "" || u.RawQuery != "" || u.Fragment != "" {
		return nil, &jsonrpc.Error{Code: jsonrpc.CodeInvalidParams, Message: "the URI of a file is sandbox://SANDBOX/PATH"}
	}
	b, err := c.existing(which{u.Host})
	if err != nil {
		return nil, notFound(name)
	}
	f, err := c.load(ctx, b, u.Path, 0, maxResource+1)
	switch {
	case errors.Is(err, &api.Problem{Code: api.CodeNotFound}):
		return nil, notFound(name)
	case err != nil:
		return nil, err
	case f.size > maxResource:
		return nil, fmt.Errorf("the file has more than %d bytes; file_read reads a part of it", maxResource)
	}
	contents := &mcp.ResourceContents{URI: name, MIMEType: mediaType(f.path, f.data)}
	if text, ok := asText(f.data, false); ok {
		contents.Text = text
	} else {
		contents.Blob = f.data
	}
	return &mcp.ReadResourceResult{Contents: []*mcp.ResourceContents{contents}}, nil
}

// notFound is the error of a resource that does not exist.
func notFound(name string) error {
	data, err := json.Marshal(map[string]string{"uri": clip(name)})
	if err != nil {
		data = nil // strings always encode
	}
	return &jsonrpc.Error{Code: jsonrpc.CodeInvalidParams, Message: "Resource not found", Data: data}
}
