"""Runs of the agent: a model that works in a sandbox until it submits."""

from __future__ import annotations

import json
import os
from typing import Any, AsyncIterator, Dict, List, Mapping, Optional, Type, TypeVar

from .. import _requests
from ..exceptions import (
    ConflictException,
    ConnectionException,
    FileNotFoundException,
    InvalidArgumentException,
    NotFoundException,
)
from ..models import AgentEvent, AgentRunInfo, _clean
from ._client import NDJSON, AsyncClient, AsyncResponse
from ._stream import Callback, call

Self = TypeVar("Self", bound="AsyncAgentRun")


class AsyncAgentRun:
    """A run of the agent that the daemon hosts. ``start`` starts one, ``connect`` finds one.

    The run needs no client: it goes on when this process ends.
    """

    def __init__(self, client: AsyncClient, info: AgentRunInfo) -> None:
        """Is called by start and connect."""
        self._client = client
        self.run_id = info.run_id
        #: The directory of the run on the daemon's host.
        self.directory = info.directory

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.run_id}>"

    @classmethod
    async def start(
        cls: Type[Self],
        query: str,
        model: Optional[str] = None,
        *,
        base_url: Optional[str] = None,
        key: Optional[str] = None,
        replay: Optional[str] = None,
        image: Optional[str] = None,
        input_dir: Optional[str] = None,
        prompt_config: Optional[str] = None,
        network: _requests.NetworkOption = None,
        allow_internet_access: Optional[bool] = None,
        limits: Optional[Mapping[str, Any]] = None,
        budget: Optional[Mapping[str, Any]] = None,
        temperature: Optional[float] = None,
        policy: Optional[str] = None,
        settings: Optional[Mapping[str, Any]] = None,
        socket: Optional[str] = None,
        request_timeout: Optional[float] = None,
    ) -> Self:
        """Starts a run for a task, and returns when it has its sandbox.

        ``model`` is a name with its provider as prefix. Without ``model``, ``base_url`` or ``key``
        the daemon's own hold. ``replay`` is a trajectory whose turns are played instead. It and
        ``input_dir`` lie on the daemon's host, where ``serve --agent-inputs`` allows it.

        ``budget`` has ``turns``, ``tokens``, ``conversation_tokens``, ``cost_usd``, ``seconds`` and
        ``cpu_seconds``. ``policy`` is the name of a preset, or YAML. ``settings`` are further fields
        of the API's request.
        """
        body = _clean(
            {
                "image": image,
                "input_dir": input_dir,
                "prompt_config": prompt_config,
                "network": _requests.network(network, allow_internet_access),
                "limits": _requests.limits(limits),
                "budget": dict(budget or {}),
                "temperature": temperature,
                "policy": policy,
            }
        )
        body["query"] = query
        body["model"] = _clean({"name": model, "base_url": base_url, "key": key, "replay": replay})
        for name, value in (settings or {}).items():
            if name in body:
                raise InvalidArgumentException(f"settings.{name}: is also given by a parameter")
            body[name] = value
        client = AsyncClient(socket)
        answer = await client.call(
            "POST", "v1", "agent", "runs", document=body, request_timeout=request_timeout
        )
        return cls(client, AgentRunInfo.of(answer))

    @classmethod
    async def connect(cls: Type[Self], run_id: str, *, socket: Optional[str] = None) -> Self:
        """Finds a run by its id."""
        client = AsyncClient(socket)
        return cls(client, AgentRunInfo.of(await client.call("GET", "v1", "agent", "runs", run_id)))

    @classmethod
    async def list(cls, *, socket: Optional[str] = None) -> List[AgentRunInfo]:
        """Lists the runs that the daemon hosts, oldest first."""
        answer = await AsyncClient(socket).call("GET", "v1", "agent", "runs")
        return [AgentRunInfo.of(d) for d in answer.get("runs") or []]

    async def get_info(self) -> AgentRunInfo:
        """Returns how the run stands."""
        return AgentRunInfo.of(await self._client.call("GET", "v1", "agent", "runs", self.run_id))

    async def events(self, start: int = 1) -> AsyncIterator[AgentEvent]:
        """Yields the lines of the run's record as they are written, until it ends.

        ``start`` is the number of the first one. A client that has lost its connection goes on
        with the number of the last event plus one, and misses nothing.
        """
        response = await self._follow(start)
        try:
            async for line in response.lines():
                if line.get("run"):
                    return
                yield AgentEvent.of(line)
            raise self._lost()
        finally:
            response.close()

    async def wait(self, on_event: Optional[Callback[AgentEvent]] = None) -> AgentRunInfo:
        """Waits until no process works on the run, and returns how it ended.

        A model that submits ends it with ``exit_reason`` "submitted". A used-up budget, an
        interrupt or an error of the model is a reason too, and no exception.
        """
        response = await self._follow(1)
        try:
            async for line in response.lines():
                if line.get("run"):
                    return AgentRunInfo.of(line["run"])
                await call(on_event, AgentEvent.of(line))
            raise self._lost()
        finally:
            response.close()

    async def _follow(self, start: int) -> AsyncResponse:
        return await self._client.open(
            "GET",
            "v1",
            "agent",
            "runs",
            self.run_id,
            "events",
            query=[("from", str(start))],
            accept=NDJSON,
        )

    def _lost(self) -> ConnectionException:
        return ConnectionException(
            f"the daemon ended the stream of agent run {self.run_id}; the run may go on"
        )

    async def cancel(self, keep: bool = False) -> None:
        """Has the run end: its programs are ended and its output is collected.

        This does not wait for its end. ``keep`` leaves the sandbox, stopped, for ``resume``.
        """
        await self._client.call(
            "POST", "v1", "agent", "runs", self.run_id, "cancel", document={"keep": keep}
        )

    async def resume(
        self,
        message: Optional[str] = None,
        *,
        key: Optional[str] = None,
        budget: Optional[Mapping[str, Any]] = None,
        settings: Optional[Mapping[str, Any]] = None,
    ) -> None:
        """Continues a run that is stopped or ended, with a message to the model.

        The key is stored nowhere: give it again, unless it is the daemon's own.
        """
        body = _clean({"message": message, "budget": dict(budget or {}), **(settings or {})})
        if key is not None:
            body["model"] = {**body.get("model", {}), "key": key}
        await self._client.call("POST", "v1", "agent", "runs", self.run_id, "resume", document=body)

    async def delete(self) -> bool:
        """Deletes the run with its directory and its sandbox, and returns whether it was there.

        A run that goes on is a ConflictException.
        """
        try:
            await self._client.call("DELETE", "v1", "agent", "runs", self.run_id)
        except NotFoundException:
            return False
        return True

    # What an ended run leaves in its directory. No request is made for it.

    def trajectory(self) -> Dict[str, Any]:
        """Returns the steps of an ended run, in the form of LLM-in-Sandbox."""
        try:
            with open(os.path.join(self.directory, "trajectory.json"), encoding="utf-8") as f:
                return dict(json.load(f))
        except FileNotFoundError:
            raise ConflictException(f"agent run {self.run_id} has not ended: wait for it") from None

    def list_files(self) -> List[str]:
        """Returns the names of the files that the model left in its output directory."""
        root = os.path.join(self.directory, "files")
        found = []
        for directory, _, names in os.walk(root):
            found += [os.path.relpath(os.path.join(directory, name), root) for name in names]
        return sorted(found)

    def read_file(self, name: str) -> bytes:
        """Returns one of these files. A link that leads out of their directory is not followed."""
        root = os.path.realpath(os.path.join(self.directory, "files"))
        path = os.path.realpath(os.path.join(root, name))
        if os.path.commonpath([root, path]) != root or not os.path.isfile(path):
            raise FileNotFoundException(f"agent run {self.run_id} has no file {name!r}")
        with open(path, "rb") as f:
            return f.read()

    def answer(self) -> Optional[str]:
        """Returns the text of ``answer.txt``, or None if the model wrote none."""
        try:
            return self.read_file("answer.txt").decode("utf-8", "replace")
        except FileNotFoundException:
            return None
