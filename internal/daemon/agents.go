package daemon

import (
	"bytes"
	"encoding/json"
	"errors"
	"net/http"
	"strconv"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/agents"
)

// maxAgentBody bounds a request about a run: a task and a prompt may be long.
const maxAgentBody = 8 << 20

// agents is the host of runs, if this daemon is one.
func (d *Daemon) agents() (*agents.Host, error) {
	if d.opts.Agents == nil {
		return nil, classify(ErrNoRoute, errors.New("this daemon hosts no runs of the agent"))
	}
	return d.opts.Agents, nil
}

func (d *Daemon) postAgentRun(w http.ResponseWriter, r *http.Request) error {
	host, err := d.agents()
	if err != nil {
		return err
	}
	var body api.StartAgentRun
	if err := readJSON(w, r, maxAgentBody, &body); err != nil {
		return err
	}
	run, err := host.Start(r.Context(), body)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusCreated, run)
}

func (d *Daemon) getAgentRuns(w http.ResponseWriter, r *http.Request) error {
	host, err := d.agents()
	if err != nil {
		return err
	}
	if _, err := query(r); err != nil {
		return err
	}
	runs, err := host.List()
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, api.AgentRunList{Runs: runs})
}

func (d *Daemon) getAgentRun(w http.ResponseWriter, r *http.Request) error {
	host, err := d.agents()
	if err != nil {
		return err
	}
	run, err := host.Get(r.PathValue("run"))
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, run)
}

func (d *Daemon) getAgentEvents(w http.ResponseWriter, r *http.Request) error {
	host, err := d.agents()
	if err != nil {
		return err
	}
	q, err := query(r, "from")
	if err != nil {
		return err
	}
	from := 1
	if text := q.Get("from"); text != "" {
		if from, err = strconv.Atoi(text); err != nil || from < 1 {
			return invalidf("from %q: want the number of a line of the record, from 1", clip(text))
		}
	}
	out := &stream{w: w, rc: http.NewResponseController(w), contentType: api.TypeNDJSON, flush: true}
	return host.Events(r.Context(), r.PathValue("run"), from, func(e api.AgentRunEvent) error {
		// As the record has it: what is escaped for HTML is up to six times as long, and clients bound their lines.
		var line bytes.Buffer
		enc := json.NewEncoder(&line)
		enc.SetEscapeHTML(false)
		if err := enc.Encode(e); err != nil {
			return err
		}
		_, err := out.Write(line.Bytes())
		return err
	})
}

func (d *Daemon) postAgentResume(w http.ResponseWriter, r *http.Request) error {
	host, err := d.agents()
	if err != nil {
		return err
	}
	var body api.ResumeAgentRun
	if r.ContentLength != 0 {
		if err := readJSON(w, r, maxAgentBody, &body); err != nil {
			return err
		}
	}
	run, err := host.Resume(r.Context(), r.PathValue("run"), body)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, run)
}

func (d *Daemon) postAgentCancel(w http.ResponseWriter, r *http.Request) error {
	host, err := d.agents()
	if err != nil {
		return err
	}
	var body api.CancelAgentRun
	if r.ContentLength != 0 {
		if err := readJSON(w, r, maxBody, &body); err != nil {
			return err
		}
	}
	run, err := host.Cancel(r.PathValue("run"), body)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusAccepted, run)
}

func (d *Daemon) deleteAgentRun(w http.ResponseWriter, r *http.Request) error {
	host, err := d.agents()
	if err != nil {
		return err
	}
	if err := host.Remove(r.Context(), r.PathValue("run")); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
