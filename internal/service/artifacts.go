package service

import (
	"context"
	"errors"
	"io/fs"
	"path"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/guest"
)

// maxArtifacts bounds the artifacts of a run.
const maxArtifacts = 1000

// mediaTypes are those of the names of files that code often makes. The host's own table may lack
// them.
var mediaTypes = map[string]string{
	".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".gif": "image/gif", ".svg": "image/svg+xml", ".webp": "image/webp",
	".pdf": "application/pdf", ".html": "text/html", ".htm": "text/html", ".md": "text/markdown", ".txt": "text/plain", ".log": "text/plain",
	".csv": "text/csv", ".tsv": "text/tab-separated-values", ".json": "application/json", ".xml": "application/xml", ".zip": "application/zip",
	".gz": "application/gzip", ".tgz": "application/gzip", ".tar": "application/x-tar", ".mp4": "video/mp4", ".webm": "video/webm", ".mp3": "audio/mpeg",
	".wav": "audio/x-wav", ".xlsx": "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet", ".parquet": "application/vnd.apache.parquet",
}

// mediaType returns the media type of a file by its name.
func mediaType(name string) string {
	if t, ok := mediaTypes[strings.ToLower(path.Ext(name))]; ok {
		return t
	}
	return "application/octet-stream"
}

// artifacts are the files that a run has written.
type artifacts struct {
	found  []api.Artifact
	missed bool // there may be more
}

// outputs lists an output directory, and returns a function that lists the files which are written
// there until it is called. Without a directory it returns none. The code may have made of the
// directory what it likes: that it cannot be read any more is no error of the run.
func (s *API) outputs(ctx context.Context, ref, dir string) (written func() artifacts, err error) {
	if dir == "" {
		return func() artifacts { return artifacts{} }, nil
	}
	if err := validatePath("output_dir", dir); err != nil {
		return nil, err
	}
	list := func() (api.FileList, error) {
		l, err := s.List(ctx, ref, dir, ListOptions{Depth: guest.MaxListDepth})
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) { // the code may make it, or take it away
			err = nil
		}
		return l, err
	}
	first, err := list()
	if err != nil {
		return nil, err
	}
	before := make(map[string]api.FileEntry, len(first.Entries))
	for _, e := range first.Entries {
		before[e.Path] = e
	}
	return func() artifacts {
		now, err := list()
		if err != nil || first.More { // what the first list has not told would seem to be new
			return artifacts{missed: true}
		}
		a := artifacts{missed: now.More}
		for _, e := range now.Entries {
			old, known := before[e.Path]
			if e.Type != api.TypeFile || known && old.Size == e.Size && old.MTime.Equal(e.MTime) {
				continue
			}
			if a.missed = a.missed || len(a.found) == maxArtifacts; len(a.found) < maxArtifacts {
				a.found = append(a.found, api.Artifact{Path: e.Path, PathBytes: e.PathBytes, Size: e.Size, MediaType: mediaType(e.Path)})
			}
		}
		return a
	}, nil
}
