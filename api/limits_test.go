package api

import (
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
)

// leaves returns the JSON paths of a struct's fields, and sets each of them in turn.
func leaves(v reflect.Value, prefix string, visit func(path string, f reflect.Value)) {
	for i := range v.NumField() {
		name, _, _ := strings.Cut(v.Type().Field(i).Tag.Get("json"), ",")
		if f := v.Field(i); f.Kind() == reflect.Struct {
			leaves(f, prefix+name+".", visit)
		} else {
			visit(prefix+name, f)
		}
	}
}

// set gives a field, or the value that it points to, a value other than zero.
func set(f reflect.Value, n int) {
	switch f.Kind() { //nolint:exhaustive // the rest panics
	case reflect.Pointer:
		f.Set(reflect.New(f.Type().Elem()))
		set(f.Elem(), n)
	case reflect.Int64:
		f.SetInt(int64(n))
	case reflect.Uint64:
		f.SetUint(uint64(n))
	case reflect.Float64:
		f.SetFloat(float64(n))
	case reflect.Bool:
		f.SetBool(n != 0)
	case reflect.String:
		f.SetString(strings.Repeat("1", n))
	default:
		panic(f.Kind())
	}
}

// A limit without a row would be merged, compared and changed by nothing.
func TestEveryLimitHasARow(t *testing.T) {
	rows := map[string]Limit{}
	for _, row := range LimitTable() {
		rows[row.Name] = row
	}
	var zero, l Limits
	var paths []string
	leaves(reflect.ValueOf(&l).Elem(), "", func(path string, f reflect.Value) {
		paths = append(paths, path)
		row, ok := rows[path]
		if !ok {
			t.Errorf("limit %s has no row", path)
			return
		}
		if row.IsSet(&l) || !row.Equal(&l, &zero) {
			t.Errorf("%s: set before it is", path)
		}
		set(f, 7)
		if !row.IsSet(&l) || row.Equal(&l, &zero) || l.Equal(&zero) {
			t.Errorf("%s: not set", path)
		}
		var copied Limits
		row.Copy(&copied, &l)
		if copied.Equal(&l) != true || copied != l {
			t.Errorf("%s: copied as %+v", path, copied)
		}
		if got := zero.WithDefaults(l); got != l {
			t.Errorf("%s: the default does not count: %+v", path, got)
		}
		if got := l.WithDefaults(Limits{Memory: 1, CPUSet: "0"}); !row.Equal(&got, &l) {
			t.Errorf("%s: the default replaces it: %+v", path, got)
		}
		if got := l.Matching(&zero); got != zero {
			t.Errorf("%s: matches another value: %+v", path, got)
		}
		if got := l.Matching(&l); got != l {
			t.Errorf("%s: does not match itself: %+v", path, got)
		}
		f.SetZero()
	})
	if len(paths) != len(rows) {
		t.Errorf("%d rows for %d limits", len(rows), len(paths))
	}

	var u LimitsUpdate
	leaves(reflect.ValueOf(&u).Elem(), "", func(path string, f reflect.Value) {
		row := rows[path]
		if i := slices.Index(paths, path); i < 0 {
			t.Errorf("%s can be changed and does not exist", path)
			return
		}
		var defaults Limits
		leaves(reflect.ValueOf(&defaults).Elem(), "", func(_ string, f reflect.Value) { set(f, 3) })
		set(f, 7)
		changed, explicit := u.Apply(Limits{}, defaults)
		if !row.IsSet(&changed) || !row.Equal(&changed, &explicit) || row.Equal(&changed, &defaults) && path != "oom_group" {
			t.Errorf("%s: changed to %+v, explicitly %+v", path, changed, explicit)
		}
		if one := changed.Matching(&explicit); one != changed {
			t.Errorf("%s: more than that is changed: %+v", path, changed)
		}
		f.Elem().SetZero()
		changed, explicit = u.Apply(Limits{}, defaults)
		if path == "swap" { // 0 is a value of it
			if *changed.Swap != 0 || *explicit.Swap != 0 {
				t.Errorf("no swap: %+v, %+v", changed, explicit)
			}
		} else if !row.Equal(&changed, &defaults) || row.IsSet(&explicit) {
			t.Errorf("%s: its default again: %+v, explicitly %+v", path, changed, explicit)
		}
		f.SetZero()
	})
}

func TestLimitRanges(t *testing.T) {
	for _, row := range LimitTable() {
		if row.value == nil {
			continue
		}
		for value, ok := range map[float64]bool{0: true, row.Min: true, row.Max: true, row.Max + 1: false, row.Min / 2: row.Min/2 >= row.Min, -1: false} {
			var l Limits
			leaves(reflect.ValueOf(&l).Elem(), "", func(path string, f reflect.Value) {
				if path != row.Name {
					return
				}
				if f.Kind() == reflect.Pointer {
					f.Set(reflect.New(f.Type().Elem()))
					f = f.Elem()
				}
				switch f.Kind() { //nolint:exhaustive // the rest are integers
				case reflect.Float64:
					f.SetFloat(value)
				case reflect.String, reflect.Uint64:
					if value < 0 || value != math.Trunc(value) {
						ok = true
						return
					}
					set(f, int(value))
				default:
					if value != math.Trunc(value) {
						ok = true
						return
					}
					f.SetInt(int64(value))
				}
			})
			if err := l.Check(); (err == nil) != ok {
				t.Errorf("%s %v: %v", row.Name, value, err)
			} else if err != nil && !strings.HasPrefix(err.Error(), "limits."+row.Name+" ") {
				t.Errorf("%s %v: %v", row.Name, value, err)
			}
		}
	}
	if err := (&Limits{CPUs: math.NaN()}).Check(); err == nil {
		t.Error("NaN is a number of cores")
	}
}
