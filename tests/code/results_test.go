package code

import (
	"bytes"
	"encoding/json"
	"fmt"
	picture "image"
	_ "image/jpeg" // of results
	_ "image/png"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api"
)

// shows is the table of rich results: code in a context of a language, and its results as [forms]
// has them.
var shows = []struct {
	language, name, code string
	want                 []string
}{
	{"python", "figures", "import matplotlib.pyplot as plt\nplt.plot([1, 2], [3, 4])\nplt.figure()\nplt.bar(['a', 'b'], [1, 2])\nplt.figure()\nNone", []string{"png chart:line", "png chart:bar"}},
	{"python", "shown", "plt.scatter([1], [2])\nplt.show()\nplt.pie([1, 2], labels=['x', 'y'])\nplt.show()", []string{"png chart:scatter", "png chart:pie"}},
	{"python", "figure", "fig, axes = plt.subplots(1, 2)\naxes[0].plot([1]); axes[1].boxplot([[1, 2, 3]])\nfig", []string{"png chart:superchart*"}},
	{"python", "savefig", "plt.plot([1, 2])\nplt.savefig('/work/f.png')\nplt.close()\nopen('/work/f.png', 'rb').read(4)", []string{`text:b'\x89PNG'*`}},
	{"python", "table", "import pandas as pd\npd.DataFrame({'a': [1, 2], 'b': ['x', None]})", []string{`html data:{"a":[1,2],"b":["x",null]}*`}},
	{"python", "image", "from PIL import Image\nImage.new('RGB', (3, 2))", []string{"png jpeg*"}},
	{"python", "seaborn", "import seaborn as sns\nsns.barplot(x=['a', 'b'], y=[1, 2]);", []string{"png chart:bar"}},
	{"python", "plotly", "import plotly.graph_objects as go\ngo.Figure(go.Bar(x=['a'], y=[1]))", []string{"html*"}},
	{"python", "ipython", "from IPython.display import HTML, Markdown, display\ndisplay(Markdown('*m*'))\nHTML('<b>h</b>')", []string{"markdown", "html*"}},
	{"python", "series", "import numpy as np\nnp.arange(3)", []string{"text:array([0, 1, 2])*"}},
	{"r", "base", "plot(1:3)\nhist(c(1, 2, 2))", []string{"png", "png"}},
	{"r", "ggplot", "library(ggplot2)\np <- ggplot(data.frame(x = 1:3, y = 3:1), aes(x, y)) + geom_line()\np", []string{"png*"}},
	{"r", "table", "data.frame(a = 1:2, b = c('x', NA))", []string{`html data:{"a":[1,2],"b":["x",null]}*`}},
	{"ruby", "html", "class H; def to_html = '<b>h</b>'; end\nH.new", []string{"html*"}},
	{"typescript", "state", "enum E { A = 3 }\nconst e: E = E.A\ne", []string{"text:3*"}},
	{"javascript", "svg", "({toSVG() { return '<svg/>' }})", []string{"svg*"}},
}

// results shows the values of libraries, in one context for each language.
func (w *workshop) results(t *testing.T) {
	of := map[string]api.Context{}
	for _, show := range shows {
		if _, ok := of[show.language]; !ok {
			c, err := w.c.CreateContext(t.Context(), w.s.ID, api.CreateContext{Language: show.language})
			if err != nil {
				t.Fatal(err)
			}
			of[show.language] = *c
		}
		t.Run(show.language+"-"+show.name, func(t *testing.T) {
			res, err := w.c.RunCode(t.Context(), w.s.ID, api.CodeRequest{Context: of[show.language].ID, Code: show.code})
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, v := range res.Results {
				got = append(got, forms(t, v))
			}
			// Not stderr: matplotlib says there when it takes long to build a cache.
			if !slices.Equal(got, show.want) || res.Failure != nil || res.Logs.Stdout != "" {
				t.Errorf("%q, want %q; %+v", got, show.want, res)
			}
		})
	}
}

// forms says in one line which forms a result has, and checks those of images. Its text is there if
// it has no other; "*" is the run's main result.
func forms(t *testing.T, v api.CodeValue) string {
	t.Helper()
	var out []string
	for _, form := range []struct{ name, text string }{{"html", v.HTML}, {"markdown", v.Markdown}, {"svg", v.SVG}, {"latex", v.LaTeX}} {
		if form.text != "" {
			out = append(out, form.name)
		}
	}
	for _, form := range []struct {
		name string
		data []byte
	}{{"png", v.PNG}, {"jpeg", v.JPEG}} {
		if form.data == nil {
			continue
		}
		out = append(out, form.name)
		if _, kind, err := picture.Decode(bytes.NewReader(form.data)); err != nil || kind != form.name {
			t.Errorf("%s: %s, %v", form.name, kind, err)
		}
	}
	if chart, ok := v.Chart.(map[string]any); ok {
		out = append(out, fmt.Sprintf("chart:%v", chart["type"]))
	}
	if v.Data != nil {
		data, err := json.Marshal(v.Data)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, "data:"+string(data))
	}
	if len(out) == 0 {
		out = append(out, "text:"+v.Text)
	}
	main := ""
	if v.Main {
		main = "*"
	}
	return strings.Join(out, " ") + main
}
