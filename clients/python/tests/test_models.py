"""Values, and the parts of the faces that need no daemon."""

import datetime
import io
import json
import os
import tarfile
import tempfile
import unittest

from sandboxd import AgentEvent, AgentRunInfo, Execution, ExecutionError, Logs, Result
from sandboxd.exceptions import CommandExitException, InvalidArgumentException, ProtocolException
from sandboxd.llm_sandbox import (
    RestrictedModule,
    SandboxSession,
    SecurityIssueSeverity,
    SecurityPattern,
    SecurityPolicy,
)
from sandboxd._finding import Finding
from sandboxd.llm_sandbox import _runtime, exceptions
from sandboxd.llm_sandbox.session import _unpack
from sandboxd.models import Chart, FilesystemEvent, env_list, parse_size, parse_time


class Values(unittest.TestCase):
    def test_times(self):
        utc = datetime.timezone.utc
        self.assertEqual(
            parse_time("2026-03-14T15:09:26.123456789Z"),
            datetime.datetime(2026, 3, 14, 15, 9, 26, 123456, utc),
        )
        self.assertEqual(
            parse_time("2026-03-14T15:09:26+01:30"), datetime.datetime(2026, 3, 14, 13, 39, 26, 0, utc)
        )
        self.assertIsNone(parse_time(None))
        for bad in ("x", "2026-03-14", "2026-13-14T15:09:26Z", "2026-03-14T15:09:26"):
            with self.assertRaises(ProtocolException):
                parse_time(bad)

    def test_agent_runs(self):
        known = {"id": "run-1", "dir": "/d", "state": "ended", "cost_usd": 0, "unknown": 1}
        info = AgentRunInfo.of(known)
        self.assertEqual((info.run_id, info.directory, info.exit_reason), ("run-1", "/d", None))
        self.assertEqual((info.turns, info.started_at, info.raw), (0, None, known))
        for bad in ({}, {**known, "turns": "x"}, {**known, "started_at": "x"}, {**known, "cost_usd": []}):
            with self.assertRaises(ProtocolException):
                AgentRunInfo.of(bad)

        event = AgentEvent.of({"n": 2, "event": {"v": 1, "n": 2, "turn": 1, "response": {"content": "x"}}})
        self.assertEqual((event.number, event.kind, event.turn, event.data), (2, "response", 1, {"content": "x"}))
        event = AgentEvent.of({"n": 3, "omitted": 4000000})
        self.assertEqual((event.number, event.kind, event.data), (3, "omitted", 4000000))
        self.assertEqual(AgentEvent.of({"n": 4, "event": {"later": {}}}).kind, "unknown")

    def test_sizes(self):
        for text, n in (("512m", 512 << 20), ("1GB", 1 << 30), ("1.5k", 1536), ("7", 7), (9, 9)):
            self.assertEqual(parse_size(text), n)
        for bad in ("", "m", "-1", "1x", True, None, 1.5):
            with self.assertRaises(InvalidArgumentException):
                parse_size(bad)

    def test_environment(self):
        self.assertEqual(env_list({"A": "b=c"}), ["A=b=c"])
        for bad in ("", "A=B"):
            with self.assertRaises(InvalidArgumentException):
                env_list({bad: "x"})

    def test_result_in_notebooks(self):
        r = Result.of(
            {
                "text": "<Figure>",
                "html": "<b>x</b>",
                "png": "iVBORw0KGgo=",
                "is_main_result": True,
                "extra": {"application/x": {"y": 1}},
            }
        )
        self.assertEqual(
            r._repr_mimebundle_(),
            {
                "text/plain": "<Figure>",
                "text/html": "<b>x</b>",
                "image/png": "iVBORw0KGgo=",
                "application/x": {"y": 1},
            },
        )
        self.assertEqual(set(r._repr_mimebundle_(include=["text/html"])), {"text/html"})
        self.assertNotIn("text/html", r._repr_mimebundle_(exclude=["text/html"]))
        self.assertEqual(r._repr_html_(), "<b>x</b>")
        self.assertEqual(r.bytes_of("png"), b"\x89PNG\r\n\x1a\n")
        self.assertEqual(list(r.formats()), ["text", "html", "png", "application/x"])
        self.assertEqual(r["html"], "<b>x</b>")
        with self.assertRaises(KeyError):
            r["svg"]
        run = Execution(results=[Result(text="no"), r])
        self.assertEqual(run.text, "<Figure>")
        self.assertEqual(run._repr_mimebundle_()["text/html"], "<b>x</b>")
        self.assertEqual(json.loads(run.to_json())["results"][1]["png"], "iVBORw0KGgo=")

    def test_execution_without_result(self):
        self.assertIsNone(Execution().text)
        run = Execution(logs=Logs(["a\n"]), error=ExecutionError("E", "v", "T"))
        self.assertEqual(run._repr_mimebundle_(), {"text/plain": "a\n"})
        self.assertEqual(json.loads(run.to_json())["error"]["name"], "E")

    def test_chart(self):
        chart = Chart({"type": "bar", "title": "t", "elements": [{"label": "a", "value": 1}]})
        self.assertEqual((chart.type, chart.elements[0].label), ("bar", "a"))
        with self.assertRaises(AttributeError):
            chart.missing

    def test_events_hide_the_name_under_which_a_file_is_written(self):
        temporary = "/w/.sandboxd-0123456789abcdef"
        self.assertIsNone(FilesystemEvent.of({"kind": "created", "path": temporary}, "/w"))
        event = FilesystemEvent.of({"kind": "moved", "from": temporary, "to": "/w/x"}, "/w")
        self.assertEqual((event.name, event.type.value), ("x", "write"))

    def test_exit_exception_pickles_its_fields(self):
        e = CommandExitException("out", "err", 3)
        self.assertEqual((e.stdout, e.stderr, e.exit_code), ("out", "err", 3))
        self.assertIn("code 3", str(e))


class Security(unittest.TestCase):
    policy = SecurityPolicy(
        SecurityIssueSeverity.MEDIUM,
        [SecurityPattern(r"\bos\.system\s*\(", "shell", SecurityIssueSeverity.HIGH)],
        [
            RestrictedModule("subprocess", "processes", SecurityIssueSeverity.HIGH),
            RestrictedModule("math", "", SecurityIssueSeverity.LOW),
        ],
    )

    def test_document(self):
        document = json.loads(self.policy.document())
        self.assertEqual(document["refuse"], "medium")
        self.assertEqual(
            document["patterns"],
            [{"pattern": r"\bos\.system\s*\(", "severity": "high", "reason": "shell"}],
        )
        self.assertEqual(document["modules"][1], {"module": "math", "severity": "low"})

    def test_document_of_odd_values(self):
        policy = SecurityPolicy(
            patterns=[
                SecurityPattern("a", "x\ny" + "ä" * 200, SecurityIssueSeverity.LOW),
                SecurityPattern("b", "", SecurityIssueSeverity.SAFE),
            ]
        )
        document = json.loads(policy.document())
        self.assertEqual(document["refuse"], "low")
        self.assertEqual(len(document["patterns"]), 1)
        reason = document["patterns"][0]["reason"]
        self.assertTrue(reason.startswith("x yä") and len(reason.encode()) <= 200)

    def test_violations_are_the_policy_s_own(self):
        finding = Finding("pattern", self.policy.patterns[0].pattern, "os.system(", 1, "high", "shell", True)
        self.assertIs(self.policy.violation(finding), self.policy.patterns[0])
        finding = Finding("module", "math", "math", 1, "low", "", False)
        self.assertEqual(self.policy.violation(finding).description, "math")
        finding = Finding("pattern", r"(?U)\z(", "", 1, "critical", "the operator's", True)
        other = self.policy.violation(finding)
        self.assertEqual((other.description, other.severity), ("the operator's", SecurityIssueSeverity.HIGH))

    def test_bad_pattern(self):
        with self.assertRaises(exceptions.InvalidRegexPatternError):
            SecurityPattern("(")


class Arguments(unittest.TestCase):
    def test_runtime_configs(self):
        self.assertEqual(
            _runtime.creation(
                {
                    "mem_limit": "512m",
                    "memswap_limit": "768m",
                    "cpu_period": 100000,
                    "cpu_quota": 50000,
                    "pids_limit": 64,
                    "network_mode": "bridge",
                    "environment": ["A=b=c"],
                    "user": 1000,
                    "read_only": True,
                    "tmpfs": {"/tmp": "size=16m,mode=1777"},
                    "volumes": {"/srv/in": {"bind": "/in", "mode": "ro"}, "cache": {"bind": "/c"}},
                    "security_opt": ["no-new-privileges:true"],
                    "ports": {"8000/tcp": 18000},
                    "privileged": False,
                    "detach": True,
                }
            ),
            {
                "limits": {"memory": 512 << 20, "swap": 256 << 20, "cpus": 0.5, "pids": 64},
                "network": "full",
                "envs": {"A": "b=c"},
                "user": "1000",
                "settings": {
                    "read_only": True,
                    "tmpfs": [{"path": "/tmp", "size": 16 << 20, "mode": 0o1777}],
                    "mounts": [
                        {"type": "bind", "source": "/srv/in", "target": "/in", "read_only": True},
                        {"type": "volume", "source": "cache", "target": "/c"},
                    ],
                },
                "ports": [{"port": 8000, "host_port": 18000, "protocol": "tcp"}],
            },
        )

    def test_what_has_no_meaning_is_refused(self):
        for configs in (
            {"privileged": True},
            {"network_mode": "host"},
            {"devices": ["/dev/kvm"]},
            {"security_opt": ["seccomp=unconfined"]},
            {"cpu_period": 100000},
            {"mem_limit": "much"},
            {"tmpfs": {"/t": "uid=3"}},
        ):
            with self.subTest(configs), self.assertRaises(exceptions.ValidationError):
                SandboxSession(runtime_configs=configs)
        with self.assertRaises(exceptions.ExtraArgumentsError):
            SandboxSession(pod_manifest={})
        with self.assertRaises(exceptions.LanguageNotSupportedError):
            SandboxSession(lang="cobol")
        with self.assertRaises(exceptions.UnsupportedBackendError):
            SandboxSession(backend="chroot")
        with self.assertRaises(exceptions.NotOpenSessionError):
            SandboxSession().run("1")


class Archives(unittest.TestCase):
    def unpack(self, entries):
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as t:
            for name, kind, content in entries:
                entry = tarfile.TarInfo(name)
                entry.type, entry.mode = kind, 0o755
                if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
                    entry.linkname = content
                    t.addfile(entry)
                else:
                    entry.size = len(content)
                    t.addfile(entry, io.BytesIO(content))
        parent = tempfile.mkdtemp()
        dest = os.path.join(parent, "dest")
        try:
            _unpack(out.getvalue(), dest)
            return parent, None
        except exceptions.ValidationError as e:
            return parent, e

    def files(self, parent):
        return sorted(
            os.path.relpath(os.path.join(d, f), parent) for d, _, fs in os.walk(parent) for f in fs
        )

    def test_ordinary(self):
        parent, e = self.unpack(
            [
                ("./a/b", tarfile.REGTYPE, b"x"),
                ("empty", tarfile.REGTYPE, b""),
                ("two..dots", tarfile.REGTYPE, b"y"),
                ("a/link", tarfile.SYMTYPE, "b"),
                ("hard", tarfile.LNKTYPE, "./a/b"),
            ]
        )
        self.assertIsNone(e)
        self.assertEqual(
            self.files(parent), ["dest/a/b", "dest/a/link", "dest/empty", "dest/hard", "dest/two..dots"]
        )
        with open(os.path.join(parent, "dest/hard"), "rb") as f:
            self.assertEqual(f.read(), b"x")

    def test_escapes(self):
        for entries in (
            [("../x", tarfile.REGTYPE, b"x")],
            [("/x", tarfile.REGTYPE, b"x")],
            [("l", tarfile.SYMTYPE, ".."), ("l/x", tarfile.REGTYPE, b"x")],
            [("l", tarfile.SYMTYPE, "/"), ("m", tarfile.SYMTYPE, "../..")],
            [("b", tarfile.SYMTYPE, "."), ("a", tarfile.SYMTYPE, "b/..")],
        ):
            with self.subTest(entries):
                parent, _ = self.unpack(entries)
                self.assertEqual([f for f in os.listdir(parent) if f != "dest"], [])
                for d, names, files in os.walk(os.path.join(parent, "dest")):
                    for name in names + files:
                        real = os.path.realpath(os.path.join(d, name))
                        self.assertTrue(real.startswith(os.path.realpath(parent) + "/dest"), real)
