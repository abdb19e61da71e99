package main

import (
	"encoding/json"
	"fmt"
	"os"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	sec "github.com/seccomp/libseccomp-golang"
)

func main() {
	for _, f := range os.Args[1:] {
		var sp specs.LinuxSeccomp
		b, _ := os.ReadFile(f)
		if err := json.Unmarshal(b, &sp); err != nil {
			panic(err)
		}
		best := time.Hour
		size := int64(0)
		for range 15 {
			t := time.Now()
			fl, err := sec.NewFilter(sec.ActErrno.SetReturnCode(38))
			if err != nil {
				panic(err)
			}
			for _, s := range sp.Syscalls {
				act := sec.ActAllow
				if s.Action != specs.ActAllow {
					e := int16(1)
					if s.ErrnoRet != nil {
						e = int16(*s.ErrnoRet)
					}
					act = sec.ActErrno.SetReturnCode(e)
				}
				for _, n := range s.Names {
					nr, err := sec.GetSyscallFromName(n)
					if err != nil {
						continue
					}
					var conds []sec.ScmpCondition
					for _, a := range s.Args {
						op := sec.CompareEqual
						v := []uint64{a.Value}
						switch a.Op {
						case specs.OpMaskedEqual:
							op = sec.CompareMaskedEqual
							v = []uint64{a.Value, a.ValueTwo}
						case specs.OpNotEqual:
							op = sec.CompareNotEqual
						}
						c, err := sec.MakeCondition(a.Index, op, v...)
						if err != nil {
							panic(err)
						}
						conds = append(conds, c)
					}
					_ = fl.AddRuleConditional(nr, act, conds)
				}
			}
			o, _ := os.CreateTemp("", "bpf")
			fl.ExportBPF(o)
			st, _ := o.Stat()
			size = st.Size() / 8
			o.Close()
			os.Remove(o.Name())
			fl.Release()
			best = min(best, time.Since(t))
		}
		fmt.Println(f, best, size, "instructions")
	}
}
