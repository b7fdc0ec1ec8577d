"""The API's own description: what FastAPI makes of the routes, with scopes, examples, and what each may answer."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Iterable, Iterator
from importlib.resources import files
from typing import Any

from fastapi import FastAPI
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute

from advisor.api.access import Needs
from advisor.api.etags import TAGGED
from advisor.api.idempotency import METHODS, QUESTIONS
from advisor.api.problems import MEDIA_TYPE

SECURITY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "Of `kvadvisor token create`, or an issuer's."},
    "session": {"type": "apiKey", "in": "cookie", "name": "kvadvisor", "description": "Of `/login`, for browsers."},
}
OPERATIONS = ("get", "post", "put", "patch", "delete")

_PROBLEM = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
_KEY = {
    "name": "Idempotency-Key", "in": "header", "required": False,
    "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!-~]+$"},
    "description": "Of your choice, for this request alone: sent again with it, nothing is done twice.",
}  # fmt: skip
_IF_NONE_MATCH = {
    "name": "If-None-Match", "in": "header", "required": False, "schema": {"type": "string"},
    "description": "ETag of the answer that you have: 304 where it is the same.",
}  # fmt: skip


_making = threading.Lock()


class DescribedApp(FastAPI):
    """A FastAPI whose `/openapi.json` says for each route the scope it needs (`x-required-scope`), whether it serves
    those who see one tenant alone (`x-serves-tenants`), and examples of what is sent and answered."""

    needs_login = True
    """Where it does not, programs may leave the token out."""

    def openapi(self) -> dict[str, Any]:
        """Made once, when it is first asked for: routes are asked in threads, and FastAPI makes it in place."""
        with _making:
            return self._made()

    def _made(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            document = copy.deepcopy(super().openapi())
            needs = dict(_needs_of_routes(self.routes))
            for path, methods in document["paths"].items():
                for method in methods.keys() & set(OPERATIONS):
                    about = methods[method]
                    _describe(about, path, method.upper(), needs.get((path, method.upper()), []))
                    if about["security"] and not self.needs_login:
                        about["security"].append({})
            document["components"]["securitySchemes"] = SECURITY_SCHEMES
            _add_examples(document)
            self.openapi_schema = document
        return self.openapi_schema


def operation_id(route: APIRoute) -> str:
    """`get_volumes_volume_id_scrub`: of method and path, so that it stays when a function is renamed."""
    words = route.path_format.removeprefix("/api/v1").replace("{", "").replace("}", "").strip("/")
    return "_".join([min(route.methods or {"GET"}).lower(), *words.replace("-", "_").replace(":path", "").split("/")])


def _needs_of_routes(routes: list[BaseRoute]) -> Iterator[tuple[tuple[str, str], list[Needs]]]:
    """What each route asks for, by path and method."""
    for route in routes:
        # An included router resolves its routes, with the dependencies that it adds, when they are asked for.
        resolved: Iterable[Any] = (
            route.effective_route_contexts() if hasattr(route, "effective_route_contexts") else [route]
        )
        for each in resolved:
            if hasattr(each, "dependant"):
                needs = list(_needs_of(each.dependant))
                yield from (((each.path_format, method), needs) for method in each.methods)


def _needs_of(dependant: Dependant) -> Iterator[Needs]:
    if isinstance(dependant.call, Needs):
        yield dependant.call
    for each in dependant.dependencies:
        yield from _needs_of(each)


def _describe(about: dict[str, Any], path: str, method: str, needs: list[Needs]) -> None:
    answers = about["responses"]
    answers["default"] = {"description": "Refused, or failed: the problem says why.", "content": _PROBLEM}
    if not needs:
        about["security"] = []
    else:
        scope = max(each.scope for each in needs).word
        about["security"] = [{name: []} for name in SECURITY_SCHEMES]
        about["x-required-scope"] = scope
        about["x-serves-tenants"] = all(each.tenants for each in needs)
        answers.setdefault("401", {"description": "Who asks is not known.", "content": _PROBLEM})
        answers.setdefault("403", {"description": f"It needs scope {scope}.", "content": _PROBLEM})
    if method in METHODS and path not in QUESTIONS and path.startswith("/api/v1/"):
        about.setdefault("parameters", []).append(_KEY)
    if method == "GET" and TAGGED.fullmatch(path):
        about.setdefault("parameters", []).append(_IF_NONE_MATCH)
        answers["304"] = {"description": "The answer is the one that you have."}


def _add_examples(document: dict[str, Any]) -> None:
    """Examples of `examples.json`, by the name of a schema or the title of one without a name; a list's is of one."""
    examples: dict[str, Any] = json.loads(files("advisor.api").joinpath("examples.json").read_text("utf-8"))
    schemas = document["components"]["schemas"]
    for name in examples.keys() & schemas.keys():
        schemas[name]["examples"] = [examples[name]]
    for methods in document["paths"].values():
        for method in methods.keys() & set(OPERATIONS):
            for answer in methods[method]["responses"].values():
                schema = answer.get("content", {}).get("application/json", {}).get("schema", {})
                item = schema.get("items", {}).get("$ref", "").rpartition("/")[2]
                if item in examples:
                    schema["examples"] = [[examples[item]]]
                elif schema.get("title") in examples:
                    schema["examples"] = [examples[schema["title"]]]
