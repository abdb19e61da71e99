package httpapi

import (
	"net/http"

	"github.com/sandboxd/sandboxd/api"
)

func (s *Server) getNetworks(w http.ResponseWriter, r *http.Request) error {
	q, err := query(r, "label")
	if err != nil {
		return err
	}
	labels, err := labelsOf(q)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, s.as(r).NamedNetworks(labels))
}

func (s *Server) postNetwork(w http.ResponseWriter, r *http.Request) error {
	var body api.CreateNetwork
	if err := readJSON(w, r, maxBody, &body); err != nil {
		return err
	}
	n, err := s.as(r).CreateNetwork(body)
	if err != nil {
		return err
	}
	w.Header().Set("Location", "/v1/networks/"+n.Name)
	return writeJSON(w, http.StatusCreated, n)
}

func (s *Server) getNetwork(w http.ResponseWriter, r *http.Request) error {
	if _, err := query(r); err != nil {
		return err
	}
	n, err := s.as(r).NamedNetwork(r.PathValue("network"))
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, n)
}

func (s *Server) deleteNetwork(w http.ResponseWriter, r *http.Request) error {
	if err := s.as(r).RemoveNetwork(r.PathValue("network")); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s *Server) postNetworksPrune(w http.ResponseWriter, r *http.Request) error {
	return prune(w, r, s.as(r).PruneNetworks)
}

func (s *Server) postNetworkConnect(w http.ResponseWriter, r *http.Request) error {
	var body api.ConnectNetwork
	if err := readJSON(w, r, maxBody, &body); err != nil {
		return err
	}
	if err := s.as(r).ConnectNetwork(r.Context(), r.PathValue("network"), body); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s *Server) postNetworkDisconnect(w http.ResponseWriter, r *http.Request) error {
	var body api.DisconnectNetwork
	if err := readJSON(w, r, maxBody, &body); err != nil {
		return err
	}
	if err := s.as(r).DisconnectNetwork(r.Context(), r.PathValue("network"), body); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
