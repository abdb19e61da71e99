package docker

// Reasons that several rows share. dockerd is version 20.10; the face is of a later one.
const (
	whyLater     = "later versions of Docker answer so"
	whyFault     = "a request that makes no sense is the client's fault, and the message says what it should be"
	whyCase      = "later versions of Docker begin messages with a small letter"
	whyJSON      = "later versions of Docker say that the JSON is bad, with status 400"
	whyPower     = "refused by name: see the table of HostConfig's fields"
	whyFields    = "fields that were dropped from later versions of Docker's API"
	whyStore     = "IDs of images are digests of manifests, as with containerd's store"
	whyInside    = "where files are on the host is the daemon's to know"
	whyProfile   = "the profile restricts programs, and masks more paths than Docker"
	whyNoDriver  = "volumes have no drivers"
	whyRegistry  = "registries are asked by pull and push alone"
	whyArchive   = "the archive is unpacked inside the container, in our words"
	whyEarly     = "Docker finds it at the start of the container, or never"
	whyBuilder   = "steps make no images and containers of their own, as with BuildKit"
	whyAddresses = "the daemon chooses addresses, in one range for all networks"
	whyNames     = "more names are possible, and longer ones are not"
)

// differences is the table of expected differences.
var differences = []difference{
	// Versions and headers.
	{"* header.Api-Version", `"1.41"`, `"1.51"`, 469, "the versions of the daemons"},
	{"* header.Server", `"Docker/20.10.24+dfsg1 (linux)"`, `"Docker/28.5.2 (linux)"`, 469, "the versions of the daemons"},
	{"* header.Api-Version", "absent", `"1.51"`, 14, "every answer has these headers"},
	{"* header.Server", "absent", `"Docker/28.5.2 (linux)"`, 14, "every answer has these headers"},
	{"* header.Docker-Experimental", "absent", `"false"`, 16, "every answer has these headers"},
	{"* header.Ostype", "absent", `"linux"`, 14, "every answer has these headers"},
	{"*_ping header.Builder-Version", "absent", `"1"`, 3, whyLater},
	{"*_ping header.Swarm", "absent", `"inactive"`, 3, whyLater},
	{"* header.Content-Type", "absent", `"application/vnd.docker.raw-stream"`, 9, whyLater},
	{"GET /v1.99/version body.message", "*is 1.41\"", "*is 1.51\"", 1, "the versions of the daemons"},
	{"GET /v1.11/version body", "*is 1.12, please*", "*is 1.24, please*", 1, "the versions of the daemons"},
	{"GET /v1.11/version header.Content-Type", `"text/plain; charset=utf-8"`, `"application/json"`, 1, "every error has the same form"},
	{"GET *version body.Experimental", "absent", "false", 3, "of later versions of Docker's API"},
	{"GET *version body.Components[1].Details.GitCommit", "*", "absent", 3, "the second component is sandboxd, and not containerd"},
	{"OPTIONS /info *", "*", "*", 3, "nothing asks for the options of a path: web pages are refused"},
	{"GET /info body.KernelMemory*", "false", "absent", 2, whyFields},
	{"GET /info body.RegistryConfig.AllowNondistributable*", "[]", "absent", 2, whyFields},
	{"GET /info body.Runtimes.io.containerd.*", "*", "absent", 2, "sandboxd is the one runtime"},
	{"GET /info body.CDISpecDirs", "absent", "null", 1, "of later versions of Docker's API"},
	{"GET /system/df body.Images[*].Labels.*", "*", "absent", 5, "sums of sizes do not read every image"},

	// Requests that make no sense.
	{"* status", "500", "400", 39, whyFault},
	{"* body.message", `"unexpected EOF"`, `"invalid JSON: unexpected EOF"`, 6, whyJSON},
	{"* body.message", `"EOF"`, `"invalid JSON: got EOF while reading request body"`, 2, whyJSON},
	{"* body.message", `"got EOF while reading request body"`, `"invalid JSON: got EOF while reading request body"`, 1, whyJSON},
	{"* body.message", `"json: cannot unmarshal *`, `"invalid JSON: json: cannot unmarshal *`, 3, whyJSON},
	{"* body.message", `"Invalid filter *`, `"invalid filter *`, 9, whyCase},
	{"docker * stderr", "*: Invalid filter 'nosuch'\\n\"", "*: invalid filter 'nosuch'\\n\"", 2, whyCase},
	{"* body.message", `"invalid character 'x' looking for beginning of value"`, `"invalid filter: invalid character 'x' looking for beginning of value"`, 3, whyFault},
	{"GET /containers/json?filters=%7B body.message", `"unexpected end of JSON input"`, `"invalid filter: unexpected end of JSON input"`, 1, whyFault},
	{"* body.message", `"strconv.*`, `"invalid *`, 9, whyFault},
	{"GET /containers/json?filters=%7B%22health* body.message", `"Unrecognised filter value for health: nosuch"`, `"invalid filter 'health=nosuch'"`, 1, whyFault},
	{"GET /containers/json?filters=%7B%22before* status", "500", "404", 1, whyFault},
	{"GET /containers/json?filters=%7B%22before* body.message", `"no such container nosuch"`, `"No such container: nosuch"`, 1, whyCase},
	{"POST /containers/web/wait?condition=nosuch status", "200", "400", 1, whyLater},
	{"POST /containers/web/wait?condition=nosuch body.message", "absent", `"invalid condition: \"nosuch\""`, 1, whyLater},
	{"POST /containers/web/wait?condition=nosuch body.StatusCode", "0", "absent", 1, whyLater},
	{"* body.Error", "null", "absent", 6, whyLater},
	{"* /containers/web/archive body.message", `"bad parameter: pathcannot be empty"`, `"bad parameter: path cannot be empty"`, 2, "a blank"},
	{"POST /containers/web/exec body.message", `"Invalid escape keys (nosuch) provided"`, `"invalid detach keys (nosuch)"`, 1, whyCase},

	// Images.
	{"GET /images/* body.message", `"no such image: *: No such image: *`, `"No such image: *`, 5, whyLater},
	{"GET /images/UPPER/json body.message", `"no such image: UPPER: invalid reference format: repository name must be lowercase"`, `"invalid reference format: repository name must be lowercase"`, 1, whyLater},
	{"GET /images/*get* body.message", `"No such image: nosuch"`, `"No such image: nosuch:latest"`, 2, "one message for all requests"},
	{"docker save nosuch stderr", `*No such image: nosuch\n"`, `*No such image: nosuch:latest\n"`, 1, "one message for all requests"},
	{"GET /images/search *", "*", "*", 2, whyRegistry},
	{"POST /auth *", "*", "*", 1, whyRegistry},
	{"POST /images/create body.message", `"Get \"http:\": http: no Host in request URL"`, `"invalid reference format"`, 1, whyFault},
	{"POST /images/create?fromImage=127.0.0.1:1/nosuch&tag=1 body.message", `*connection refused"`, `*connection refused; *`, 1, "our message says what was tried"},
	{"POST /images/*/push* status", "400", "404", 2, "a push without credentials is one without a password, as in later versions of Docker"},
	{"POST /images/*/push* body.message", `"Bad parameters and missing X-Registry-Auth: EOF"`, `"No such image: *`, 2, "a push without credentials is one without a password, as in later versions of Docker"},
	{"POST /images/load body.error*", "*", `"import: *`, 4, "our words about an archive that is none"},
	{"docker load < nothing stderr", "*unexpected EOF*", `"import: *unexpected EOF*`, 1, "our words about an archive that is none"},
	{"GET /images/json* body[*].Labels", "null", "{}", 2, "clients need not tell null from none"},
	{"GET /images/json* body[*].RepoDigests", "null", "*@sha256:<id>*", 5, whyStore},
	{"GET /images/*/json body.RepoDigests", "[]", "*@sha256:<id>*", 7, whyStore},
	{"GET /images/*/json body.Comment", `"Imported from -"`, `""`, 5, "the history says that it was imported, and by which program"},
	{"GET /images/*/history body[*].Comment", `"Imported from -"`, `""`, 3, "the history says that it was imported, and by which program"},
	{"GET /images/*/history body[*].CreatedBy", `""`, `"sandboxd import --rootfs"`, 3, "the history says that it was imported, and by which program"},
	{"docker history --format {{.CreatedBy}} tool:1 stdout", `"\n"`, `"sandboxd import --rootfs\n"`, 1, "the history says that it was imported, and by which program"},
	{"GET /images/kept:1/history body[0].CreatedBy", "*", `"sandboxd commit"`, 1, "the history says by which program it was committed"},
	{"GET /images/kept:1/history body[1].Id", `"sha256:<id>"`, `"<missing>"`, 1, "images have no parents, as in later versions of Docker"},
	{"GET /images/kept:1/history body[1].Tags", `["tool:1"]`, "null", 1, "images have no parents, as in later versions of Docker"},
	{"GET /images/*/json body.Parent", `"sha256:<id>"`, `""`, 2, "images have no parents, as in later versions of Docker"},
	{"GET /images/*/json body.Container", "*", "absent", 7, whyFields},
	{"GET /images/*/json body.ContainerConfig.*", "*", "*", 29, whyFields},
	{"GET /images/*/json body.DockerVersion", `"20.10.24+dfsg1"`, `""`, 7, "Docker has not made it"},
	{"GET * body.Config.OnBuild", "null", "absent", 18, "of later versions of Docker's API"},
	{"GET /images/*/json body.Config.Image", "*", `""`, 2, whyFields},
	{"GET /images/kept:1/json body.Config.Domainname", `"example"`, `""`, 1, "the names of the container are not those of its image's containers"},
	{"GET /images/kept:1/json body.Config.Hostname", `"box"`, `""`, 1, "the names of the container are not those of its image's containers"},
	{"GET /images/kept:1/json body.Config.StopTimeout", "600", "absent", 1, "an image has no grace period"},
	{"GET * body.GraphDriver.Data.*", "*", "absent", 67, whyInside},
	{"docker rmi kept:1 stdout", `*Deleted: sha256:<id>\nDeleted: sha256:<id>\n"`, `"Untagged: kept:1\nDeleted: sha256:<id>\n"`, 1, "layers are not listed"},

	// Creation of containers.
	{"POST /containers/create body.message", `"No command specified"`, `"no command specified"`, 1, whyCase},
	{"POST /containers/create body.message", "absent", `"no image specified: Config.Image is empty"`, 1, "a container has an image"},
	{"POST /containers/create* body.message", `"Invalid container name (*`, `"Invalid container name (*`, 2, whyNames},
	{"POST /containers/create?name=a *", "*", "*", 4, whyNames},
	{"docker run --rm --name -bad --network none tool:1 true stderr", "*are allowed.\\n*", "*are allowed, and at most 63 characters.\\n*", 1, whyNames},
	{"* body.message", "*Error when allocating new name: Invalid container name (/a/b)*", "*Error when allocating new name: Invalid container name (a/b)*", 1, whyNames},
	{"docker rename shop a/b stderr", "*Invalid container name (/a/b)*", "*Invalid container name (a/b)*", 1, whyNames},
	{"* body.message", `"create a/b: *`, `"create a/b: *at most 128 of them*`, 2, whyNames},
	{"docker run --rm --network none -v relative/path:/x tool:1 true stderr", "*create relative/path: *", "*create relative/path: *at most 128 of them*", 1, whyNames},
	{"POST /containers/create status", "201", "400", 5, whyEarly},
	{"POST /containers/create body.Id", "*", "absent", 8, whyEarly},
	{"POST /containers/create body.Warnings", "[]", "absent", 8, whyEarly},
	{"POST /containers/create body.message", "absent", `"health_check.test: *`, 1, whyEarly},
	{"POST /containers/create body.message", "absent", `"invalid volume specification: 'relative'"`, 1, whyEarly},
	{"POST /containers/create body.message", "absent", `"HostConfig.Tmpfs *`, 1, whyEarly},
	{"POST /containers/create body.message", "absent", `"HostConfig.PortBindings 80/nosuch: *`, 1, whyEarly},
	{"POST /containers/create status", "201", "404", 1, whyEarly},
	{"POST /containers/create body.message", "absent", `"No such container: nosuch"`, 1, whyEarly},
	{"* body.message", `"invalid restart policy 'nosuch'"`, `"invalid restart policy: unknown policy 'nosuch'; *`, 2, whyLater},
	{"* body.message", `"maximum retry count *`, `"invalid restart policy: maximum retry count *`, 3, whyLater},
	{"docker update --restart nosuch shop stderr", "*invalid restart policy 'nosuch'*", "*invalid restart policy: unknown policy 'nosuch'; *", 1, whyLater},
	{"POST /containers/create body.message", `"Minimum memory limit allowed is 6MB"`, `"limits.memory 1: *`, 1, "smaller limits are possible"},
	{"POST /containers/create body.message", `"invalid CapAdd: unknown capability: \"CAP_NOSUCH\""`, `"cap_add \"NOSUCH\": no such capability"`, 1, "our words"},
	{"POST /containers/create body.message", `"invalid CapDrop: unknown capability: \"CAP_NOSUCH\""`, `"cap_drop \"NOSUCH\": no such capability"`, 1, "our words"},
	{"POST /containers/create body.message", `"invalid port specification: \"99999\""`, `"invalid JSON: invalid port '99999': value out of range"`, 1, "our words"},
	{"POST /containers/create body.message", "*", `"HostConfig.SecurityOpt \"nosuch\": *`, 1, whyPower},
	{"POST /containers/create body.message", "*", `"HostConfig.Runtime \"nosuch\": *`, 1, whyPower},
	{"POST /containers/create body.message", "*", `"HostConfig.IpcMode \"nosuch\": *`, 1, whyPower},
	{"POST /containers/create body.message", "*", `"HostConfig.PidMode \"nosuch\": *`, 1, whyPower},
	{"POST /containers/create status", "*", "403", 4, whyPower},

	// Containers as they are shown.
	{"GET * body*Mounts[*].Source", "*", `""`, 15, whyInside},
	{"GET * body*Mounts[*].Mode", `"z"`, `""`, 3, "labels of SELinux are not set"},
	{"GET /containers/*/json* body.HostConfig.KernelMemory*", "0", "absent", 22, whyFields},
	{"GET /containers/*/json* body.HostConfig.MaskedPaths", "*", "null", 11, whyProfile},
	{"GET /containers/*/json* body.HostConfig.ReadonlyPaths", "*", "null", 11, whyProfile},
	{"GET /containers/*/json* body.HostConfig.OomKillDisable", "false", "null", 4, whyLater},
	{"GET * body.Config.Healthcheck.Interval", "3600000000000", "absent", 2, "a check of one's own takes nothing from the image's, as with BuildKit"},
	{"GET /containers/web/json body.State.Health.Status", `"unhealthy"`, `"starting"`, 1, "a paused container keeps its health"},
	{"GET /containers/broken/json body.State.Error", "*", `"its main process could not be started: *`, 1, "our words"},

	// Containers through their lives.
	{"* body.message", `"Container <id> is *`, `"container <id> is *`, 9, whyCase},
	{"docker * stderr", `*: Container <id> is *`, `*: container <id> is *`, 3, whyCase},
	{"* body.message", `"Cannot kill container: *`, `"cannot kill container: *`, 3, whyCase},
	{"docker kill * stderr", "*: Cannot kill container: *", "*: cannot kill container: *", 1, whyCase},
	{"POST /containers/web/unpause status", "500", "409", 2, "the state of the container is in conflict with the request"},
	{"* body.message", `"Container web is paused, unpause*`, `"container <id> is paused, unpause*`, 1, whyCase},
	{"docker exec web true stderr", "*: Container web is paused, unpause*", "*: container <id> is paused, unpause*", 1, whyCase},
	{"DELETE /containers/web body.message", `"You cannot remove a *`, `"cannot remove container \"/web\": *`, 2, whyLater},
	{"docker rm shop stderr", "*: You cannot remove a running container*", `*: cannot remove container \"/shop\": container is running*`, 1, whyLater},
	{"DELETE /containers/web?link=1 body.message", "*", `"link: there are no links; *`, 1, "there are no links"},
	{"POST /containers/*/attach?stream=1&stdout=1 *", "*", "*", 10, "Docker answers with an error in a stream; ours is like all others, as in later versions"},
	{"GET /containers/web/top?ps_args=nosuch *", "*", "*", 4, "the daemon lists processes by itself, in one format"},
	{"POST /containers/broken/start body.message", `"failed to create shim task: OCI runtime create failed: *`, `"failed to create task for container: failed to create shim task: OCI runtime create failed: *`, 1, whyLater},
	{"POST /containers/denied/start body.message", `"failed to create shim task: OCI runtime create failed: *`, `"failed to create task for container: failed to create shim task: OCI runtime create failed: *`, 1, whyLater},
	{"docker run * stderr", "*: failed to create shim task: OCI runtime create failed: *", "*: failed to create task for container: failed to create shim task: OCI runtime create failed: *", 2, whyLater},
	{"POST /containers/stranger/start body.message", `"unable to find user nosuch: no matching entries in passwd file"`, `*user \"nosuch\": no matching entries in passwd file*`, 1, "our words"},
	{"docker run --rm --network none -u nosuch tool:1 id stderr", "*unable to find user nosuch: no matching entries in passwd file*", `*user \"nosuch\": no matching entries in passwd file*`, 1, "our words"},
	{"POST /containers/prune body.ContainersDeleted", "*", "*", 2, whyEarly},
	{"docker container prune -f stdout", `"Deleted Containers:\n<id>\n\nTotal reclaimed space: 0B\n"`, `"Total reclaimed space: 0B\n"`, 1, "run --rm leaves no container that could not be started"},
	{"docker run --rm --network none tool:1 grep -E *", "*NoNewPrivs:\\t0*", "*NoNewPrivs:\\t1*", 1, whyProfile},

	// Execs.
	{"POST /exec/$exec/start status", "200", "409", 1, "a second start is a conflict"},
	{"POST /exec/$exec/start header.Content-Type", `"application/vnd.docker.raw-stream"`, `"application/json"`, 1, "a second start is a conflict"},
	{"POST /exec/$exec/start body.message", "absent", `"exec <id> has been started already"`, 1, "a second start is a conflict"},
	{"POST /exec/$exec/start body.std*", "*", "absent", 2, "a second start is a conflict"},
	{"GET /exec/$exec/json body.ExitCode", "126", "127", 1, whyLater},
	{"docker exec web nosuch code", "126", "127", 1, whyLater},
	{"POST /exec/$exec/start body.stdout", `*chdir to cwd (\"/nosuch\") set in config.json failed: no such file or directory*`, `"enter working directory \"/nosuch\": no such file or directory\r\n"`, 1, "our words"},
	{"docker exec -w /nosuch web true stdout", `*chdir to cwd (\"/nosuch\") set in config.json failed: no such file or directory*`, `"enter working directory \"/nosuch\": no such file or directory\r\n"`, 1, "our words"},
	{"POST /exec/$exec/start body.stdout", `"unable to find user nosuch: no matching entries in passwd file\r\n"`, `"user \"nosuch\": no matching entries in passwd file*`, 1, "our words"},

	// Files.
	{"GET /containers/web/archive?path=/root/a.txt/ body.message", `"lstat *: not a directory"`, `"lstat /root/a.txt/: not a directory"`, 1, whyInside},
	{"PUT /containers/web/archive?path=/root* body.message", `"Error processing tar file*`, `"archive for \"/root\": *`, 2, whyArchive},
	{"PUT /containers/web/archive?path=/root&noOverwriteDirNonDir=1 body.message", `*cannot overwrite directory \"/root/dir\" *`, `"\"/root\": is a directory"`, 1, whyArchive},

	// Networks.
	{"GET /networks body", "*", "*", 1, "the host's network is none of a container's"},
	{"GET /networks* body*EnableIPv4", "absent", "true", 9, whyLater},
	{"GET /networks* body*IPAM.Config", "*", "[]", 7, whyAddresses},
	{"GET /networks* body*Internal", "false", "true", 7, "--docker-network is none here: no container reaches the outside"},
	{"GET /networks* body*Options.*", "*", "absent", 6, "those of Docker's own bridge"},
	{"GET /networks/* body.Containers.<id>.MacAddress", "*", `""`, 1, whyAddresses},
	{"GET /networks/* body.Containers.<id>.IPv4Address", "*", "*/15\"", 1, whyAddresses},
	{"POST /networks/create body.message", `"operation is not permitted on predefined bridge network "`, `"operation is not permitted on predefined bridge network"`, 1, "a blank"},
	{"POST /networks/create body.message", `"invalid name: "`, "*", 1, whyNames},
	{"POST /networks/create body.message", "*", `"network x: Driver *`, 2, whyNoDriver},
	{"POST /networks/create status", "404", "403", 1, whyNoDriver},
	{"POST /networks/inner/disconnect status", "500", "403", 1, whyFault},

	{"GET /networks?filters=%7B%22dangling* body", "*", "[]", 1, "a stopped container is in its networks"},
	{"DELETE /networks/net1 body.message", "*has active endpoints\"", "*has active endpoints (name:*", 1, whyLater},

	// Events.
	{"GET /events?*exec_start* body[0].*", `"exec_start: echo hi"`, `"exec_start: echo"`, 2, "arguments may be secrets"},
	{"GET /events?*die* body*.Actor.Attributes.exitCode", `"137"`, "absent", 3, "an end by a stop, before the request, of a container that has started again or is gone"},
	{"GET /events?*volume* body", "*", "*", 1, "Docker tells of a volume again that is there already"},

	// Volumes.
	{"POST /volumes/create status", "400", "403", 1, whyNoDriver},
	{"POST /volumes/create body.message", `"create xx: invalid option: \"nosuch\""`, `"DriverOpts \"nosuch\": *`, 1, whyNoDriver},
	{"POST /volumes/prune body.VolumesDeleted", "*", "*", 1, "a volume without a name goes with its last container"},

	// Builds.
	{"POST /build* body", "*", "*", 2, whyBuilder},
	{"POST /build body.message", `"dockerfile parse error line 1: unknown instruction: NOSUCH"`, `"Dockerfile:1: unknown instruction: NOSUCH"`, 1, "our words"},
	{"POST /build body.message", `"failed to parse Dockerfile: file with no instructions"`, `"Dockerfile:1: file with no instructions"`, 1, "our words"},
	{"POST /build* body.message", `"Cannot locate specified Dockerfile: *`, `"the context has no file *`, 2, "our words"},
	{"POST /build?buildargs=x body.message", `"error reading build args: *`, `"buildargs: invalid JSON: *`, 1, "our words"},
	{"POST /build?target=nosuch body.message", `"failed to reach build target nosuch in Dockerfile"`, `"Dockerfile: no stage is called \"nosuch\""`, 1, "our words"},
	{"docker build * stdout", "* ---> Running in <id>*", "*Step 2/2 : RUN exit 3*", 1, whyBuilder},
	{"docker build * stderr", "*returned a non-zero code: 3*", "*exit code 3*", 1, "our words"},
}
