package openapi

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Value is one constant of a closed list of strings.
type Value struct {
	Name, Value, Comment string
}

// Comments are the comments of exported types, and the values of their constants.
type Comments struct {
	Types  map[string]string // by type
	Fields map[string]string // by "Type.Field"
	Values map[string][]Value
}

// ReadComments parses the Go files in the directories, tests left out.
func ReadComments(dirs ...string) (*Comments, error) {
	c := &Comments{Types: map[string]string{}, Fields: map[string]string{}, Values: map[string][]Value{}}
	for _, dir := range dirs {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return nil, err
		}
		for _, e := range entries {
			if !strings.HasSuffix(e.Name(), ".go") || strings.HasSuffix(e.Name(), "_test.go") {
				continue
			}
			file, err := parser.ParseFile(token.NewFileSet(), filepath.Join(dir, e.Name()), nil, parser.ParseComments)
			if err != nil {
				return nil, fmt.Errorf("read comments: %w", err)
			}
			for _, d := range file.Decls {
				if g, ok := d.(*ast.GenDecl); ok {
					c.read(g)
				}
			}
		}
	}
	return c, nil
}

func (c *Comments) read(decl *ast.GenDecl) {
	for _, spec := range decl.Specs {
		switch spec := spec.(type) {
		case *ast.TypeSpec:
			doc := spec.Doc
			if doc == nil {
				doc = decl.Doc
			}
			c.Types[spec.Name.Name] = text(doc)
			if st, ok := spec.Type.(*ast.StructType); ok {
				for _, f := range st.Fields.List {
					for _, name := range f.Names {
						c.Fields[spec.Name.Name+"."+name.Name] = strings.TrimSpace(text(f.Doc) + " " + text(f.Comment))
					}
				}
			}
		case *ast.ValueSpec:
			t, ok := spec.Type.(*ast.Ident)
			if !ok || len(spec.Names) != 1 || len(spec.Values) != 1 {
				continue
			}
			if lit, ok := spec.Values[0].(*ast.BasicLit); ok && lit.Kind == token.STRING {
				value, err := strconv.Unquote(lit.Value)
				if err == nil {
					c.Values[t.Name] = append(c.Values[t.Name], Value{spec.Names[0].Name, value, text(spec.Comment)})
				}
			}
		}
	}
}

// text joins the lines of each paragraph, and drops the brackets of links to other names.
func text(g *ast.CommentGroup) string {
	var paragraphs []string
	for p := range strings.SplitSeq(g.Text(), "\n\n") {
		p = strings.Join(strings.Fields(p), " ")
		for _, mark := range []string{"[", "]"} {
			p = strings.ReplaceAll(p, mark, "")
		}
		if p != "" {
			paragraphs = append(paragraphs, p)
		}
	}
	return strings.Join(paragraphs, "\n\n")
}
