package service_test

import (
	"testing"

	"github.com/sandboxd/sandboxd/internal/service/servicetest"
)

func TestMain(m *testing.M) { servicetest.Main(m) }
