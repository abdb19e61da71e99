package boot

import "testing"

// The program runs on without the pages, which are mapped anew.
func TestPagesOfTheStartAreReleased(t *testing.T) {
	program, err := programMappings()
	if err != nil || len(program) == 0 {
		t.Fatalf("%v, %v", program, err)
	}
	for _, m := range program {
		if m.from >= m.to {
			t.Errorf("%+v", m)
		}
	}
	if err := releaseStart(program); err != nil {
		t.Error(err)
	}
	if again, err := programMappings(); err != nil || len(again) != len(program) {
		t.Errorf("%d mappings were %d, %v", len(again), len(program), err)
	}
	if err := releaseStart([]mapping{{from: 1, to: 2}}); err == nil {
		t.Error("a mapping that is none was released")
	}
}
