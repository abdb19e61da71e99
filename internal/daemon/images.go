package daemon

import (
	"context"
	"errors"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image"
)

// stored is package image as the daemon sees it.
type stored struct{ service *image.Service }

// NewImages makes the image service usable for [Options.Images]. The service stays the caller's to close.
func NewImages(s *image.Service) Images { return stored{s} }

// imageClasses are the classes of package image in ours.
var imageClasses = []struct{ from, to error }{
	{image.ErrReference, ErrInvalid}, {image.ErrNotFound, ErrNoImage}, {image.ErrRegistry, ErrRegistry}, {image.ErrInvalid, ErrImage},
}

func imageError(err error) error {
	for _, c := range imageClasses {
		if errors.Is(err, c.from) {
			return classify(c.to, err)
		}
	}
	return err
}

func (s stored) Pull(ctx context.Context, req api.PullImage, progress func(api.PullEvent)) (*Image, error) {
	img, err := s.service.Pull(ctx, req.Reference, image.PullOptions{Platform: req.Platform, Insecure: req.Insecure, Progress: progress})
	if err != nil {
		return nil, imageError(err)
	}
	return fromStore(img), nil
}

func (s stored) Get(ctx context.Context, reference string) (*Image, error) {
	img, err := s.service.Get(ctx, reference)
	if err != nil {
		return nil, imageError(err)
	}
	return fromStore(img), nil
}

func (s stored) List(ctx context.Context) ([]api.Image, error) {
	list, err := s.service.List(ctx)
	return list, imageError(err)
}

func fromStore(img *image.Image) *Image {
	return &Image{Image: img.Image, Env: img.Config.Env, Cwd: img.Config.WorkingDir, User: img.Config.User, Rootfs: img.Rootfs}
}
