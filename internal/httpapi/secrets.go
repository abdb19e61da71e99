package httpapi

import (
	"net/http"

	"github.com/sandboxd/sandboxd/api"
)

// maxSecretBody bounds a secret with its binding, in bytes.
const maxSecretBody = 64 << 10

func (s *Server) putSecret(w http.ResponseWriter, r *http.Request) error {
	var body api.SetSecret
	if err := readJSON(w, r, maxSecretBody, &body); err != nil {
		return err
	}
	secret, err := s.as(r).SetSecret(r.Context(), r.PathValue("secret"), body)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, secret)
}

func (s *Server) getSecrets(w http.ResponseWriter, r *http.Request) error {
	if _, err := query(r); err != nil {
		return err
	}
	all, err := s.as(r).Secrets()
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, api.SecretList{Secrets: all})
}

func (s *Server) deleteSecret(w http.ResponseWriter, r *http.Request) error {
	if err := s.as(r).RemoveSecret(r.Context(), r.PathValue("secret")); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
