"""The connections to a stream: each is used by one thread at a time, for one thing, and kept for the next.

They go to the leader of the stream, where what was confirmed can be read at once. The logs of a process share them:
Spark opens a log for every question that it has.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar
from weakref import finalize

from faregate.errors import BrokerUnavailable
from faregate.transports.rabbitmq_stream.address import Address
from faregate.transports.rabbitmq_stream.connection import Connection
from faregate.transports.rabbitmq_stream.identity import identify

T = TypeVar("T")

_IDLE_SECONDS = 20.0
"""A connection that nobody used for longer is not trusted."""
_IDENTITY_SECONDS = 1.0
"""Spark opens a log a hundred times a second, and asks for its id each time."""
_POOLS: dict[tuple[int, Address], "Pool"] = {}
_LOCK = threading.Lock()


def pool_of(address: Address) -> "Pool":
    """The pool of this process: what was connected before a fork belongs to the parent."""
    key = (os.getpid(), address)
    with _LOCK:
        if key not in _POOLS:
            _POOLS[key] = Pool(address)
        return _POOLS[key]


class Pool:
    def __init__(self, address: Address) -> None:
        self._address = address
        self._leader = address
        self._lock = threading.Lock()
        self._idle: list[tuple[float, Connection]] = []
        self._identified = threading.Lock()
        self._identity, self._identity_until = "", 0.0
        finalize(self, _close_all, self._idle)

    def log_id(self) -> str:
        """Of the stream, as it was a moment ago."""
        with self._identified:
            if time.monotonic() > self._identity_until:
                self._identity = self.ask(lambda connection: identify(connection, self._address.stream))
                self._identity_until = time.monotonic() + _IDENTITY_SECONDS
            return self._identity

    def ask(self, question: Callable[[Connection], T]) -> T:
        """Something that may be asked twice: a connection that died while it was idle is not the asker's business."""
        used, connection = self._take()
        try:
            return self._asked(connection, question)
        except BrokerUnavailable:
            if not used:
                raise
        _, connection = self._take(fresh=True)
        return self._asked(connection, question)

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """One that answered just now."""
        used, connection = self._take()
        if used:
            try:
                connection.leader(self._address.stream)
            except BrokerUnavailable:
                _, connection = self._take(fresh=True)
        try:
            yield connection
        finally:
            self._give_back(connection)

    def _asked(self, connection: Connection, question: Callable[[Connection], T]) -> T:
        try:
            return question(connection)
        finally:
            self._give_back(connection)

    def _take(self, *, fresh: bool = False) -> tuple[bool, Connection]:
        """Whether it was used before, and the connection."""
        with self._lock:
            while self._idle and not fresh:
                since, connection = self._idle.pop()
                if time.monotonic() - since < _IDLE_SECONDS:
                    return True, connection
                connection.close()
        return False, self._connect()

    def _connect(self) -> Connection:
        connection = self._reach()
        try:
            host, port = connection.leader(self._address.stream)
        except BaseException:
            connection.close()
            raise
        if (host, port) == (self._leader.host, self._leader.port):
            return connection
        connection.close()
        self._leader = replace(self._address, host=host, port=port)
        return Connection(self._leader)

    def _reach(self) -> Connection:
        """The leader, as it was; or else any host, which says who it is now."""
        address = self._address
        others = (replace(address, host=host, port=port) for host, port in address.others)
        failure: BrokerUnavailable | None = None
        for place in dict.fromkeys((self._leader, address, *others)):
            try:
                connection = Connection(place)
            except BrokerUnavailable as exc:
                failure = exc
            else:
                self._leader = place
                return connection
        assert failure is not None
        raise failure

    def _give_back(self, connection: Connection) -> None:
        if connection.is_open:
            with self._lock:
                self._idle.append((time.monotonic(), connection))


def _close_all(idle: list[tuple[float, Connection]]) -> None:
    for _, connection in idle:
        connection.close()
