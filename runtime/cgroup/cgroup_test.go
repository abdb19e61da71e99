package cgroup

import "testing"

func TestLocate(t *testing.T) {
	const (
		unified = "30 23 0:26 / /sys/fs/cgroup rw,nosuid,nodev shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
		hybrid  = "31 30 0:27 / /sys/fs/cgroup/cpu rw shared:5 - cgroup cgroup rw,cpu\n40 30 0:30 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
		part    = "30 23 0:26 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup rw\n"
	)
	for name, tc := range map[string]struct{ mountinfo, self, mount, own string }{
		"none":                {"", "0::/\n", "", ""},
		"only v1":             {"31 30 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n", "1:cpu:/\n", "", ""},
		"root":                {unified, "0::/\n", "/sys/fs/cgroup", "/sys/fs/cgroup"},
		"user unit":           {unified, "0::/user.slice/u.service\n", "/sys/fs/cgroup", "/sys/fs/cgroup/user.slice/u.service"},
		"hybrid":              {hybrid, "1:cpu:/a\n0::/b\n", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/unified/b"},
		"in a container":      {part, "0::/docker/abc/x\n", "/sys/fs/cgroup", "/sys/fs/cgroup/x"},
		"outside of mount":    {part, "0::/other\n", "/sys/fs/cgroup", ""},
		"above the namespace": {unified, "0::/../x\n", "/sys/fs/cgroup", ""},
		"no v2 line":          {unified, "1:cpu:/\n", "/sys/fs/cgroup", ""},
		"malformed mountinfo": {"x - cgroup2\n - cgroup2 \n", "0::/\n", "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			mount, own := locate(tc.mountinfo, tc.self)
			if mount != tc.mount || own != tc.own {
				t.Errorf("locate = %q, %q; want %q, %q", mount, own, tc.mount, tc.own)
			}
		})
	}
}
