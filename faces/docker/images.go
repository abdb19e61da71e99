package docker

import (
	"archive/tar"
	"bytes"
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/docker/go-units"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/network"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
)

const dockerHub = "docker.io/"

// familiar returns a reference as people write it.
func familiar(reference string) string {
	return strings.TrimPrefix(strings.TrimPrefix(reference, "index.docker.io/library/"), "docker.io/library/")
}

// shorter is familiar for names of the hub outside of its library, too.
func shorter(reference string) string {
	short := familiar(reference)
	return strings.TrimPrefix(strings.TrimPrefix(short, "index."+dockerHub), dockerHub)
}

// normalize returns a reference with registry and tag.
func normalize(ref string) string {
	name, digest, hasDigest := strings.Cut(ref, "@")
	first, _, slash := strings.Cut(name, "/")
	switch {
	case !slash:
		name = dockerHub + "library/" + name
	case !strings.ContainsAny(first, ".:") && first != "localhost":
		name = dockerHub + name
	case first == "docker.io" && strings.Count(name, "/") == 1:
		name = dockerHub + "library/" + strings.TrimPrefix(name, dockerHub)
	}
	if hasDigest {
		return name + "@" + digest
	}
	if !strings.Contains(path.Base(name), ":") {
		name += ":latest"
	}
	return name
}

// oneImage is an image with all its names.
type oneImage struct {
	id         string   // digest of its manifest, which is what Docker calls it with containerd's store
	references []string // as the daemon has them
	image      api.Image
}

type imageList []oneImage

// images returns the stored images, newest first.
func (f *Face) images(ctx context.Context) (imageList, error) {
	all, err := f.api.Images(ctx)
	if err != nil {
		return nil, err
	}
	var out imageList
	for i := range all {
		img := &all[i]
		if img.Reference == api.HostImage {
			continue
		}
		at := slices.IndexFunc(out, func(o oneImage) bool { return o.id == img.Digest })
		if at < 0 {
			out = append(out, oneImage{id: img.Digest, image: *img})
			at = len(out) - 1
		}
		out[at].references = append(out[at].references, img.Reference)
	}
	slices.SortStableFunc(out, func(a, b oneImage) int { return b.image.PulledAt.Compare(a.image.PulledAt) })
	return out, nil
}

// find returns the image with this name, ID or unique beginning of one; nil if there is none.
func (l imageList) find(ref string) *oneImage {
	want := normalize(ref)
	for i := range l {
		for _, have := range l[i].references {
			if normalize(have) == want || strings.Contains(ref, "@") && normalize(repositoryOf(have)+"@"+l[i].id) == want {
				return &l[i]
			}
		}
	}
	hexes := strings.TrimPrefix(ref, "sha256:")
	if !isHex(hexes) {
		return nil
	}
	var found *oneImage
	for i := range l {
		if strings.HasPrefix(strings.TrimPrefix(l[i].id, "sha256:"), hexes) {
			if found != nil {
				return nil
			}
			found = &l[i]
		}
	}
	return found
}

// repositoryOf returns a reference without tag and digest.
func repositoryOf(reference string) string {
	name, _, _ := strings.Cut(reference, "@")
	if at := strings.LastIndexByte(name, ':'); at > strings.LastIndexByte(name, '/') {
		name = name[:at]
	}
	return name
}

func noImage(ref string) error {
	if !strings.Contains(path.Base(ref), ":") && !strings.Contains(ref, "@") {
		ref += ":latest"
	}
	return statusf(http.StatusNotFound, "No such image: %s", clip(ref))
}

// checkReference refuses a text that names no image, before it becomes a part of others.
func checkReference(ref string) error {
	bad := strings.ContainsFunc(ref, func(r rune) bool {
		return r <= ' ' || r == 0x7f || r > 0x7f || strings.ContainsRune(`\"'<>|*?{}$;&`, r)
	})
	if ref == "" || len(ref) > 512 || bad || strings.Contains(ref, "..") || strings.Contains(ref, "//") || strings.HasPrefix(ref, "/") {
		return badf("invalid reference format")
	}
	name := repositoryOf(ref)
	if host, rest, slash := strings.Cut(name, "/"); slash && (strings.ContainsAny(host, ".:") || host == "localhost") {
		name = rest
	}
	if strings.ToLower(name) != name {
		return badf("invalid reference format: repository name must be lowercase")
	}
	return nil
}

// findImage returns the daemon's reference of the image that a client names.
func (f *Face) findImage(ctx context.Context, ref string) (string, error) {
	if err := checkReference(ref); err != nil {
		return "", err
	}
	all, err := f.images(ctx)
	if err != nil {
		return "", err
	}
	img := all.find(ref)
	if img == nil {
		return "", noImage(ref)
	}
	want := normalize(ref)
	for _, have := range img.references {
		if normalize(have) == want {
			return have, nil
		}
	}
	return img.references[0], nil
}

// tags returns the names of an image that have a tag, and those with its digest.
func (o *oneImage) tags() (tags, digests []string) {
	tags, digests = []string{}, []string{}
	for _, ref := range o.references {
		if !strings.Contains(ref, "@") {
			tags = append(tags, shorter(ref))
		}
		if d := shorter(repositoryOf(ref)) + "@" + o.id; !slices.Contains(digests, d) && !strings.HasPrefix(ref, "localhost/build@") {
			digests = append(digests, d)
		}
	}
	return tags, digests
}

func (c *call) getImages() error {
	want, err := c.filters("before", "dangling", "label", "label!", "reference", "since", "until")
	if err != nil {
		return err
	}
	if name := c.q.Get("filter"); name != "" { // of clients before 1.41
		want["reference"] = append(want["reference"], name)
	}
	for _, w := range want["dangling"] {
		if !slices.Contains([]string{"0", "1", "true", "false"}, strings.ToLower(w)) {
			return badf("invalid filter 'dangling=[%s]'", clip(w))
		}
	}
	all, err := c.f.images(c.ctx())
	if err != nil {
		return err
	}
	before, since, err := all.bounds(c, want)
	if err != nil {
		return err
	}
	out := []map[string]any{}
	for i := range all {
		img := &all[i]
		d, err := c.f.api.Image(c.ctx(), img.references[0])
		if errors.Is(err, &api.Problem{Code: api.CodeNotFound}) {
			continue // removed meanwhile
		}
		if err != nil {
			return err
		}
		at := createdAt(d, d.Created)
		if !before.IsZero() && !at.Before(before) || !at.After(since) {
			continue
		}
		tags, digests := img.tags()
		if len(want["reference"]) > 0 { // of several names those that fit are shown
			tags = slices.DeleteFunc(tags, func(tag string) bool {
				return !want.has("reference", func(w string) bool {
					one, _ := path.Match(w, tag)
					two, _ := path.Match(w, repositoryOf(tag))
					return one || two
				})
			})
			if len(tags) == 0 {
				continue
			}
			digests = slices.DeleteFunc(digests, func(d string) bool {
				return !slices.ContainsFunc(tags, func(tag string) bool { return repositoryOf(tag) == repositoryOf(d) })
			})
		}
		labels := d.Config.Labels
		if labels == nil {
			labels = map[string]string{}
		}
		if !want.labels(labels) || !want.has("dangling", func(w string) bool { return truth(w) == (len(tags) == 0) }) {
			continue
		}
		out = append(out, map[string]any{
			"Id": img.id, "ParentId": "", "RepoTags": tags, "RepoDigests": digests, "Created": at.Unix(), "Size": sizeOf(d), "VirtualSize": sizeOf(d),
			"SharedSize": -1, "Labels": labels, "Containers": -1, // GET /system/df counts them
		})
	}
	return c.json(http.StatusOK, out)
}

// bounds returns the times between which wanted images were made; zero without a bound.
func (l imageList) bounds(c *call, want filters) (before, since time.Time, err error) {
	for _, key := range []string{"before", "since"} {
		for _, ref := range want[key] {
			if err := checkReference(ref); err != nil {
				return before, since, err
			}
			img := l.find(ref)
			if img == nil {
				return before, since, noImage(ref)
			}
			d, err := c.f.api.Image(c.ctx(), img.references[0])
			if err != nil {
				return before, since, err
			}
			at := createdAt(d, d.Created)
			if key == "since" && at.After(since) {
				since = at
			}
			if key == "before" && (before.IsZero() || at.Before(before)) {
				before = at
			}
		}
	}
	return before, since, nil
}

// sizeOf returns the bytes of an image's files.
func sizeOf(d *api.ImageDetail) int64 {
	var n int64
	for i := range d.Parts {
		n += cmp.Or(d.Parts[i].TreeSize, d.Parts[i].Size)
	}
	return n
}

// detail returns the image that the path names.
func (c *call) detail() (*oneImage, *api.ImageDetail, error) {
	if err := checkReference(c.args[0]); err != nil {
		return nil, nil, err
	}
	all, err := c.f.images(c.ctx())
	if err != nil {
		return nil, nil, err
	}
	img := all.find(c.args[0])
	if img == nil {
		return nil, nil, noImage(c.args[0])
	}
	d, err := c.f.api.Image(c.ctx(), img.references[0])
	if errors.Is(err, &api.Problem{Code: api.CodeNotFound}) {
		return nil, nil, noImage(c.args[0])
	}
	return img, d, err
}

func (c *call) getImage() error {
	img, d, err := c.detail()
	if err != nil {
		return err
	}
	tags, digests := img.tags()
	layers := []string{}
	for i := range d.Parts {
		layers = append(layers, d.Parts[i].DiffID)
	}
	os, arch, _ := strings.Cut(d.Platform, "/")
	comment := ""
	if n := len(d.History); n > 0 {
		comment = d.History[n-1].Comment
	}
	cfg := configOf(&d.Config)
	return c.json(http.StatusOK, map[string]any{
		"Id": img.id, "RepoTags": tags, "RepoDigests": digests, "Parent": "", "Comment": comment, "Created": timeText(createdAt(d, d.Created)), "Author": d.Author,
		"Config": cfg, "ContainerConfig": container.Config{}, "DockerVersion": "", "Architecture": arch, "Os": os, "Size": sizeOf(d), "VirtualSize": sizeOf(d),
		"GraphDriver": map[string]any{"Name": "overlay2", "Data": map[string]string{}}, "RootFS": map[string]any{"Type": "layers", "Layers": layers},
		"Metadata": map[string]any{"LastTagTime": timeText(d.PulledAt)},
	})
}

// configOf returns the configuration of an image in Docker's form.
func configOf(c *api.ImageConfig) container.Config {
	cfg := container.Config{
		Entrypoint: c.Entrypoint, Cmd: c.Cmd, Env: c.Env, WorkingDir: c.WorkingDir, User: c.User, Labels: c.Labels, StopSignal: c.StopSignal,
	}
	for _, at := range c.Volumes {
		if cfg.Volumes == nil {
			cfg.Volumes = map[string]struct{}{}
		}
		cfg.Volumes[at] = struct{}{}
	}
	for _, text := range c.Ports {
		if port, err := network.ParsePort(text); err == nil { // the image's, untrusted
			if cfg.ExposedPorts == nil {
				cfg.ExposedPorts = network.PortSet{}
			}
			cfg.ExposedPorts[port] = struct{}{}
		}
	}
	if c.HealthCheck != nil {
		cfg.Healthcheck = healthConfig(c.HealthCheck)
	}
	return cfg
}

// createdAt returns the time at which an image was made. One that does not say it was made when it
// came.
func createdAt(d *api.ImageDetail, says time.Time) time.Time {
	if says.IsZero() {
		return d.PulledAt
	}
	return says
}

func (c *call) getHistory() error {
	img, d, err := c.detail()
	if err != nil {
		return err
	}
	tags, _ := img.tags()
	out := []map[string]any{}
	for i := range d.History {
		h := &d.History[i]
		row := map[string]any{"Id": "<missing>", "Created": createdAt(d, h.Created).Unix(), "CreatedBy": h.CreatedBy, "Tags": nil, "Size": h.Size, "Comment": h.Comment}
		if i == len(d.History)-1 {
			row["Id"], row["Tags"] = img.id, tags
		}
		out = append(out, row)
	}
	slices.Reverse(out)
	return c.json(http.StatusOK, out)
}

func (c *call) postTag() error {
	from, err := c.f.findImage(c.ctx(), c.args[0])
	if err != nil {
		return err
	}
	target := c.q.Get("repo")
	if err := checkReference(target); err != nil {
		return err
	}
	if strings.Contains(target, "@") {
		return badf("refusing to create a tag with a digest reference")
	}
	if tag := c.q.Get("tag"); tag != "" {
		if err := checkTag(tag); err != nil {
			return err
		}
		target += ":" + tag
	}
	if _, err := c.f.api.TagImage(c.ctx(), from, normalize(target)); err != nil {
		return err
	}
	return c.none(http.StatusCreated)
}

func checkTag(tag string) error {
	bad := strings.ContainsFunc(tag, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '_' && r != '.' && r != '-'
	})
	if bad || len(tag) > 128 || strings.HasPrefix(tag, ".") || strings.HasPrefix(tag, "-") {
		return badf("invalid tag format")
	}
	return nil
}

func (c *call) deleteImage() error {
	if err := checkReference(c.args[0]); err != nil {
		return err
	}
	all, err := c.f.images(c.ctx())
	if err != nil {
		return err
	}
	img := all.find(c.args[0])
	if img == nil {
		return noImage(c.args[0])
	}
	force := c.bool("force")
	names := img.references
	byName := false
	for _, have := range img.references {
		if normalize(have) == normalize(c.args[0]) {
			names, byName = []string{have}, true
		}
	}
	if !byName && len(names) > 1 && !force {
		return statusf(http.StatusConflict, "conflict: unable to delete %s (must be forced) - image is referenced in multiple repositories", clip(c.args[0]))
	}
	user, err := c.f.userOf(c.ctx(), img.id)
	if err != nil {
		return err
	}
	if user != nil && !byName && (!force || lives(user)) {
		return imageUsed(c.args[0], user)
	}
	out := []map[string]string{}
	for _, name := range names {
		removed, err := c.f.api.RemoveImage(c.ctx(), name, force)
		if errors.Is(err, &api.Problem{Code: api.CodeConflict}) && user != nil {
			return statusf(http.StatusConflict, "conflict: unable to remove repository reference %q (must force) - container %s is using its referenced image %s",
				c.args[0], shortDigest(containerID(user.ID)), shortDigest(img.id))
		}
		if errors.Is(err, &api.Problem{Code: api.CodeConflict}) {
			return statusf(http.StatusConflict, "conflict: unable to remove repository reference %q (must force) - %v", clip(c.args[0]), err)
		}
		if err != nil {
			return err
		}
		out = append(out, map[string]string{"Untagged": shorter(name)})
		if len(removed.Untagged) == 0 && len(names) == len(img.references) && name == names[len(names)-1] {
			out = append(out, map[string]string{"Deleted": img.id})
		}
	}
	return c.json(http.StatusOK, out)
}

// userOf returns a container that has an image, a running one if there is any; nil if none has it.
func (f *Face) userOf(ctx context.Context, image string) (*api.Sandbox, error) {
	all, err := f.api.ListSandboxes(ctx, client.ListOptions{})
	if err != nil {
		return nil, err
	}
	var user *api.Sandbox
	for i := range all {
		if sb := &all[i]; sb.ImageDigest == image && (user == nil || lives(sb)) {
			user = sb
		}
	}
	return user, nil
}

// imageUsed returns the error for an image that is named by its ID and has a container.
func imageUsed(ref string, user *api.Sandbox) error {
	must, state := "must be forced", "stopped"
	if lives(user) {
		must, state = "cannot be forced", "running"
	}
	return statusf(http.StatusConflict, "conflict: unable to delete %s (%s) - image is being used by %s container %s",
		shortDigest(ref), must, state, shortDigest(containerID(user.ID)))
}

func (c *call) postImagesPrune() error {
	want, err := c.filters("dangling", "until", "label", "label!")
	if err != nil {
		return err
	}
	all := want["dangling"] != nil && want.has("dangling", func(w string) bool { return !truth(w) })
	out, err := c.f.api.PruneImages(c.ctx(), api.PruneImages{All: all})
	if err != nil {
		return err
	}
	var deleted []map[string]string
	for _, ref := range out.Removed {
		deleted = append(deleted, map[string]string{"Untagged": shorter(ref)})
	}
	return c.json(http.StatusOK, map[string]any{"ImagesDeleted": deleted, "SpaceReclaimed": out.Bytes})
}

// auth reads the credentials of a request; nil without any.
func (c *call) auth() (*api.RegistryAuth, error) {
	text := c.r.Header.Get("X-Registry-Auth")
	if text == "" {
		return nil, nil //nolint:nilnil // none is no error
	}
	data, err := base64.URLEncoding.DecodeString(text)
	if err != nil {
		data, err = base64.RawURLEncoding.DecodeString(strings.TrimRight(text, "="))
	}
	if err != nil {
		data, err = base64.StdEncoding.DecodeString(text)
	}
	if err != nil {
		return nil, badf("X-Registry-Auth: must be base64url-encoded")
	}
	var a struct{ Username, Password, IdentityToken, RegistryToken string }
	if err := json.Unmarshal(data, &a); err != nil {
		return nil, badf("X-Registry-Auth: invalid JSON")
	}
	if a.Username == "" && a.Password == "" && a.IdentityToken == "" {
		return nil, nil //nolint:nilnil // as above
	}
	return &api.RegistryAuth{Username: a.Username, Password: a.Password, IdentityToken: a.IdentityToken}, nil
}

// progress is one line of progress.
type progress struct {
	Stream         string          `json:"stream,omitempty"`
	Status         string          `json:"status,omitempty"`
	ProgressDetail *progressDetail `json:"progressDetail,omitempty"`
	Progress       string          `json:"progress,omitempty"`
	ID             string          `json:"id,omitempty"`
	ErrorDetail    *errorDetail    `json:"errorDetail,omitempty"`
	Error          string          `json:"error,omitempty"`
	Aux            any             `json:"aux,omitempty"`
}

type progressDetail struct {
	Current int64 `json:"current,omitempty"`
	Total   int64 `json:"total,omitempty"`
}

type errorDetail struct {
	Code    int    `json:"code,omitempty"`
	Message string `json:"message"`
}

// lines sends progress. The head of the answer goes with the first line, so that an error before
// has its own status.
type lines struct {
	c     *call
	began bool
}

func (l *lines) send(p progress) {
	if !l.began {
		l.began = true
		l.c.w.Header().Set("Content-Type", "application/json")
		l.c.w.WriteHeader(http.StatusOK)
	}
	_ = l.c.encode(p) // a client that is gone ends the request
	l.c.flush()
}

func (l *lines) fail(err error) error {
	if !l.began {
		return err
	}
	l.send(progress{ErrorDetail: &errorDetail{Message: err.Error()}, Error: err.Error()})
	return errAnswered
}

// encode writes one line of JSON.
func (c *call) encode(v any) error { return json.NewEncoder(c.w).Encode(v) }

func shortDigest(d string) string {
	d = strings.TrimPrefix(d, "sha256:")
	return d[:min(12, len(d))]
}

// layerLines turns the daemon's progress into Docker's.
func (l *lines) layer(e api.PullEvent, verbs map[string]string) {
	if e.Layer == "" {
		return
	}
	p := progress{ID: shortDigest(e.Layer), Status: cmp.Or(verbs[e.Status], e.Status), ProgressDetail: &progressDetail{}}
	if e.Total > 0 && (e.Status == "downloading" || e.Status == "uploading") {
		p.ProgressDetail = &progressDetail{e.Bytes, e.Total}
		done := int(50 * e.Bytes / e.Total)
		p.Progress = fmt.Sprintf("[%s>%s] %8s/%s", strings.Repeat("=", min(49, max(0, done-1))), strings.Repeat(" ", max(0, 50-max(1, done))),
			units.HumanSize(float64(e.Bytes)), units.HumanSize(float64(e.Total)))
	}
	l.send(p)
}

func (c *call) postImagesCreate() error {
	if c.q.Get("fromSrc") != "" {
		return c.importImage()
	}
	ref, tag := c.q.Get("fromImage"), c.q.Get("tag")
	if err := checkReference(ref); err != nil {
		return err
	}
	auth, err := c.auth()
	if err != nil {
		return err
	}
	platform := c.q.Get("platform")
	switch {
	case strings.Contains(tag, ":"): // a digest
		if hexes, ok := strings.CutPrefix(tag, "sha256:"); !ok || len(hexes) != idLength || !isHex(hexes) {
			return badf("invalid tag format")
		}
		ref = repositoryOf(ref) + "@" + tag
	case tag != "":
		if err := checkTag(tag); err != nil {
			return err
		}
		ref = repositoryOf(ref) + ":" + tag
	case !strings.Contains(path.Base(ref), ":") && !strings.Contains(ref, "@"):
		ref += ":latest"
	}
	full := normalize(ref)
	before, err := c.f.images(c.ctx())
	if err != nil {
		return err
	}
	out := &lines{c: c}
	label := full[strings.LastIndexAny(full, ":@")+1:]
	begin := func() {
		if !out.began {
			out.send(progress{Status: "Pulling from " + shorter(repositoryOf(full)), ID: label})
		}
	}
	img, err := c.f.api.Pull(c.ctx(), api.PullImage{Reference: full, Platform: platform, Auth: auth}, func(e api.PullEvent) {
		begin()
		out.layer(e, map[string]string{"downloading": "Downloading", "applying": "Extracting", "exists": "Already exists", "done": "Pull complete"})
	})
	if err != nil {
		return out.fail(pullError(err, ref))
	}
	begin()
	out.send(progress{Status: "Digest: " + img.Digest})
	what := "Downloaded newer image for "
	if was := before.find(full); was != nil && was.id == img.Digest {
		what = "Image is up to date for "
	}
	out.send(progress{Status: "Status: " + what + shorter(full)})
	return errAnswered
}

// pullError puts the words into an error by which clients tell a missing image.
func pullError(err error, ref string) error {
	p, ok := errors.AsType[*api.Problem](err)
	if !ok || p.Code != api.CodeRegistry && p.Code != api.CodeNotFound {
		return err
	}
	if strings.Contains(p.Detail, "does not have it") || strings.Contains(p.Detail, "may not exist") {
		return statusf(http.StatusNotFound, "pull access denied for %s, repository does not exist or may require 'docker login': %v", shorter(repositoryOf(normalize(ref))), err)
	}
	return err
}

func (c *call) postPush() error {
	name := c.args[0]
	if tag := c.q.Get("tag"); tag != "" {
		if err := checkTag(tag); err != nil {
			return err
		}
		name = repositoryOf(name) + ":" + tag
	}
	auth, err := c.auth()
	if err != nil {
		return err
	}
	ref, err := c.f.findImage(c.ctx(), name)
	if err != nil {
		return err
	}
	out := &lines{c: c}
	out.send(progress{Status: "The push refers to repository [" + repositoryOf(normalize(name)) + "]"})
	img, err := c.f.api.Push(c.ctx(), api.PushImage{Reference: ref, Auth: auth}, func(e api.PullEvent) {
		out.layer(e, map[string]string{"uploading": "Pushing", "exists": "Layer already exists", "done": "Pushed"})
	})
	if err != nil {
		return out.fail(err)
	}
	full := normalize(name)
	tag := full[strings.LastIndexByte(full, ':')+1:]
	out.send(progress{Status: fmt.Sprintf("%s: digest: %s size: %d", tag, img.Digest, img.Size)})
	out.send(progress{ProgressDetail: &progressDetail{}, Aux: map[string]any{"Tag": tag, "Digest": img.Digest, "Size": img.Size}})
	return errAnswered
}

func (c *call) getSave() error {
	names := c.q["names"]
	if len(c.args) > 0 {
		names = []string{c.args[0]}
	}
	if len(names) == 0 {
		return badf("no image is named")
	}
	var refs []string
	for _, name := range names {
		ref, err := c.f.findImage(c.ctx(), name)
		if err != nil {
			return err
		}
		refs = append(refs, ref)
	}
	first, err := c.f.api.ExportImage(c.ctx(), refs[0], "docker")
	if err != nil {
		return err
	}
	defer first.Close()
	c.w.Header().Set("Content-Type", "application/x-tar")
	c.w.WriteHeader(http.StatusOK)
	if len(refs) == 1 {
		_, err = io.Copy(c.w, first)
	} else {
		err = c.saveAll(first, refs[1:])
	}
	if err != nil {
		c.f.log.Info("save broke off", "error", err)
		panic(http.ErrAbortHandler) // half an archive must not look like a whole one
	}
	return errAnswered
}

// saveAll writes several archives as one: their files, each once, and the list of all images.
func (c *call) saveAll(first io.Reader, rest []string) error {
	out := tar.NewWriter(c.w)
	seen := map[string]bool{}
	var manifest []json.RawMessage
	add := func(in io.Reader) error {
		for r := tar.NewReader(in); ; {
			h, err := r.Next()
			if errors.Is(err, io.EOF) {
				return nil
			}
			if err != nil {
				return err
			}
			if h.Name == "manifest.json" {
				var entries []json.RawMessage
				if err := json.NewDecoder(io.LimitReader(r, maxBody)).Decode(&entries); err != nil {
					return err
				}
				manifest = append(manifest, entries...)
				continue
			}
			if seen[h.Name] {
				continue
			}
			seen[h.Name] = true
			if err := out.WriteHeader(h); err != nil {
				return err
			}
			if _, err := io.Copy(out, r); err != nil { //nolint:gosec // it is passed on as it comes
				return err
			}
		}
	}
	if err := add(first); err != nil {
		return err
	}
	for _, ref := range rest {
		in, err := c.f.api.ExportImage(c.ctx(), ref, "docker")
		if err != nil {
			return err
		}
		err = add(in)
		if cerr := in.Close(); err == nil {
			err = cerr
		}
		if err != nil {
			return err
		}
	}
	list, err := json.Marshal(manifest)
	if err != nil {
		return err
	}
	if err := out.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "manifest.json", Mode: 0o644, Size: int64(len(list))}); err != nil {
		return err
	}
	if _, err := io.Copy(out, bytes.NewReader(list)); err != nil {
		return err
	}
	return out.Close()
}

func (c *call) postLoad() error {
	in, err := decompressed(c.r.Body)
	if err != nil {
		return badf("read the archive: %v", err)
	}
	out := &lines{c: c}
	images, err := c.f.api.ImportImages(c.ctx(), in, client.ImportOptions{})
	if err != nil { // clients look for it among the lines
		out.send(progress{ErrorDetail: &errorDetail{Message: err.Error()}, Error: err.Error()})
		return errAnswered
	}
	for i := range images {
		what := "Loaded image: " + shorter(images[i].Reference)
		if strings.Contains(images[i].Reference, "@") {
			what = "Loaded image ID: " + images[i].Digest
		}
		out.send(progress{Stream: what + "\n"})
	}
	return errAnswered
}

func (c *call) importImage() error {
	if c.q.Get("fromSrc") != "-" {
		return badf("fromSrc %q: only the body of the request is imported", clip(c.q.Get("fromSrc")))
	}
	cfg, err := changesOf(c.q["changes"])
	if err != nil {
		return err
	}
	ref, err := c.target("localhost/import")
	if err != nil {
		return err
	}
	in, err := decompressed(c.r.Body)
	if err != nil {
		return badf("read the archive: %v", err)
	}
	images, err := c.f.api.ImportImages(c.ctx(), in, client.ImportOptions{Reference: ref, Rootfs: true, Config: cfg})
	if err != nil {
		return err
	}
	out := &lines{c: c}
	for i := range images {
		out.send(progress{Status: images[i].Digest})
	}
	return errAnswered
}

// target returns the name of a new image: the request's, or one of its own.
func (c *call) target(otherwise string) (string, error) {
	repo, tag := c.q.Get("repo"), c.q.Get("tag")
	if repo == "" {
		return fmt.Sprintf("%s:%x", otherwise, time.Now().UnixNano()), nil
	}
	if err := checkReference(repo); err != nil {
		return "", err
	}
	if tag != "" {
		if err := checkTag(tag); err != nil {
			return "", err
		}
		repo += ":" + tag
	}
	return normalize(repo), nil
}

func (c *call) postCommit() error {
	var body container.Config
	if err := c.read(&body, true); err != nil {
		return err
	}
	sb, err := c.f.find(c.ctx(), c.q.Get("container"))
	if err != nil {
		return err
	}
	cfg, err := changesOf(c.q["changes"])
	if err != nil {
		return err
	}
	req := requestOf(sb)
	merge := func(to *[]string, from ...[]string) {
		for _, f := range from {
			if len(*to) == 0 {
				*to = f
			}
		}
	}
	merge(&cfg.Cmd, body.Cmd, req.Cmd)
	merge(&cfg.Entrypoint, body.Entrypoint, req.Entrypoint)
	if len(cfg.Entrypoint) > 0 && len(cfg.Cmd) == 0 {
		cfg.Cmd = sb.Cmd
	}
	cfg.Env = slices.Concat(req.Env, body.Env, cfg.Env)
	cfg.WorkingDir = cmp.Or(cfg.WorkingDir, body.WorkingDir, req.WorkingDir)
	cfg.User = cmp.Or(cfg.User, body.User, req.User)
	for _, labels := range []map[string]string{body.Labels, req.Labels} {
		for k, v := range labels {
			if cfg.Labels == nil {
				cfg.Labels = map[string]string{}
			}
			if _, ok := cfg.Labels[k]; !ok {
				cfg.Labels[k] = v
			}
		}
	}
	ref, err := c.target("localhost/commit")
	if err != nil {
		return err
	}
	out, err := c.f.api.Commit(c.ctx(), sb.ID, api.CommitSandbox{Reference: ref, Config: cfg, Comment: c.q.Get("comment"), Author: c.q.Get("author")})
	if err != nil {
		return err
	}
	return c.json(http.StatusCreated, map[string]string{"Id": out.Image.Digest})
}

// programExit finds the exit code in the daemon's words about a RUN that failed: clients end with
// it.
var programExit = regexp.MustCompile(`: exit code ([0-9]{1,3})\b`)

// postBuild builds with the classic protocol: the context in the body, lines in the answer.
func (c *call) postBuild() error {
	if v := c.q.Get("version"); v == "2" {
		return statusf(http.StatusBadRequest, "BuildKit is not offered here: build with DOCKER_BUILDKIT=0, which docker build does by itself without buildx")
	}
	if c.q.Get("remote") != "" {
		return badf("remote contexts are not fetched: send the context in the body")
	}
	opts := api.Build{
		Dockerfile: strings.TrimPrefix(path.Clean("/"+cmp.Or(c.q.Get("dockerfile"), "Dockerfile")), "/"), Target: c.q.Get("target"), NoCache: c.bool("nocache"),
		Platform: c.q.Get("platform"), Network: c.f.opts.Network,
	}
	for _, t := range c.q["t"] {
		if t == "" {
			continue
		}
		if err := checkReference(t); err != nil {
			return err
		}
		opts.Tags = append(opts.Tags, normalize(t))
	}
	switch mode := c.q.Get("networkmode"); mode {
	case "", "default", "bridge":
	case "none":
		opts.Network = api.Network{Mode: api.NetworkNone}
	default:
		return badf("networkmode %q: none and default are possible", clip(mode))
	}
	for _, p := range []struct {
		name string
		to   any
	}{{"buildargs", &opts.Args}, {"labels", &opts.Labels}} {
		if text := c.q.Get(p.name); text != "" {
			var values map[string]*string
			if err := json.Unmarshal([]byte(text), &values); err != nil {
				return badf("%s: invalid JSON: %v", p.name, err)
			}
			m := map[string]string{}
			for k, v := range values {
				if v != nil {
					m[k] = *v
				}
			}
			*p.to.(*map[string]string) = m //nolint:forcetypeassert // the two above
		}
	}
	in, err := decompressed(c.r.Body)
	if err != nil {
		return badf("read the context: %v", err)
	}
	out := &lines{c: c}
	quiet := c.bool("q")
	img, err := c.f.api.Build(c.ctx(), in, opts, func(e api.BuildEvent) {
		if quiet {
			return
		}
		switch text := e.Output; {
		case e.Status == api.BuildStarted || e.Status == api.BuildCached:
			out.send(progress{Stream: fmt.Sprintf("Step %d/%d : %s\n", e.Step, e.Steps, e.Text)})
			if e.Status == api.BuildCached {
				out.send(progress{Stream: " ---> Using cache\n"})
			}
		case e.Data != nil:
			out.send(progress{Stream: strings.ToValidUTF8(string(e.Data), "\uFFFD")})
		case text != "":
			out.send(progress{Stream: text})
		case e.Pull != nil && e.Pull.Layer != "":
			out.layer(*e.Pull, map[string]string{"downloading": "Downloading", "applying": "Extracting", "exists": "Already exists", "done": "Pull complete"})
		}
	})
	if err != nil {
		if m := programExit.FindStringSubmatch(err.Error()); m != nil && out.began {
			code, _ := strconv.Atoi(m[1]) // digits
			out.send(progress{ErrorDetail: &errorDetail{Code: code, Message: err.Error()}, Error: err.Error()})
			return errAnswered
		}
		return out.fail(err)
	}
	if quiet {
		out.send(progress{Stream: img.Digest + "\n"})
		return errAnswered
	}
	out.send(progress{Aux: map[string]string{"ID": img.Digest}})
	out.send(progress{Stream: "Successfully built " + shortDigest(img.Digest) + "\n"})
	for _, t := range opts.Tags {
		out.send(progress{Stream: "Successfully tagged " + shorter(t) + "\n"})
	}
	return errAnswered
}
