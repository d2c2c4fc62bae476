"""Which column of a table holds what: as its user says, else told by its name."""

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from protofed.errors import DataError

Names = tuple[str, ...]  # in small letters, without marks: userid is user_id, userId and "User ID"


def _ids(*words: str) -> Names:
    return tuple(name for word in words for name in (word, f"{word}id"))


USER: tuple[Names, ...] = (
    (*_ids("user", "customer", "visitor", "client", "member", "reviewer", "buyer", "shopper", "subscriber"), "uid"),
    ("username", "account", "accountid", "profileid", "deviceid", "cookieid", "anonymousid", "email"),
)
ITEM: tuple[Names, ...] = (
    (
        *_ids("item", "product", "article", "movie", "book", "track", "song", "video", "business", "listing"),
        *_ids("location", "venue", "place", "poi", "offer", "goods", "recipe", "news", "document", "content"),
        *("iid", "sku", "asin", "parentasin", "isbn", "docid", "stockcode"),
    ),
)
TIME: tuple[Names, ...] = (
    (
        *("timestamp", "time", "ts", "datetime", "date", "unixtime", "unixtimestamp", "unixreviewtime", "epoch"),
        *("createdat", "createdon", "eventtime", "eventtimestamp", "eventdate", "eventts", "occurredat", "tdat"),
        *("orderdate", "orderedat", "purchasedate", "purchasedat", "invoicedate", "transactiondate", "reviewtime"),
        *("reviewdate", "ratedat", "watchedat", "viewedat", "clickedat", "playedat", "visitedat", "checkintime"),
        *("createtime", "created", "datecreated", "timems", "timestampms"),
    ),
    ("updatedat", "day"),
)
RATING: tuple[Names, ...] = (("rating", "ratings", "score", "stars", "overall"),)
EVENT: tuple[Names, ...] = (
    (
        *("event", "eventtype", "eventname", "action", "actiontype", "behavior", "behaviortype"),
        *("behaviour", "behaviourtype", "interaction", "interactiontype"),
    ),
)
ROLES: Mapping[str, tuple[Names, ...]] = {"user": USER, "item": ITEM, "time": TIME, "rating": RATING, "event": EVENT}
NEEDED = ("user", "item", "time")

ID: tuple[Names, ...] = (*ITEM, ("id",))
ABOUT_ITEMS: Mapping[str, Names] = {  # the best name first
    "title": ("title", "name", *(f"{thing}{word}" for thing in ("item", "product", "movie", "article", "track", "book")
                                 for word in ("title", "name")), "prodname", "venuename", "headline", "label"),
    "text": ("text", "description", *(f"{thing}description" for thing in ("item", "product", "long", "short")),
             "detaildesc", "desc", "overview", "summary", "abstract", "body", "content", "details", "plot"),
    "category": ("category", "categories", "genre", "genres", "categoryname", "maincategory", "producttypename",
                 "producttype", "itemcategory", "productcategory", "categoryid", "department", "departmentname",
                 "type"),
    "lat": ("lat", "latitude"),
    "lon": ("lon", "lng", "long", "longitude"),
    "image": ("image", "imagepath", "imagefile", "imageurl", "img", "imgurl", "imurl", "picture", "photo", "thumbnail"),
}  # fmt: skip


def plain(name: str) -> str:
    """The name in small letters, without marks."""
    return re.sub(r"[\W_]", "", name.lower())


def matching(columns: Iterable[str], tiers: Iterable[Names]) -> list[str]:
    """The columns named in the first tier that names any."""
    columns = list(columns)
    for names in tiers:
        if found := [column for column in columns if plain(column) in names]:
            return found
    return []


def best(columns: Iterable[str], names: Names) -> str | None:
    """The column with the best of the names."""
    found = matching(columns, (names,))
    return min(found, key=lambda column: names.index(plain(column)), default=None)


def asked_for(name: str, flag: str, columns: Sequence[str], file: Path) -> str:
    """The column of that name, written as the file does."""
    if name in columns:
        return name
    alike = [column for column in columns if plain(column) == plain(name)]
    if len(alike) == 1:
        return alike[0]
    near = difflib.get_close_matches(plain(name), {plain(column): column for column in columns}, n=1, cutoff=0.5)
    meant = next((f" (did you mean {shown(column)}?)" for column in columns if plain(column) in near), "")
    raise DataError(f"{file}: {flag} {name!r} is none of its columns{meant}; they are {listed(columns)}")


def choose(asked: Mapping[str, str | None], columns: Sequence[str], file: Path) -> tuple[dict[str, str], list[str]]:
    """The column of each role, and remarks; an empty name leaves the role out, None leaves it to a guess."""
    named = {role: name for role, name in asked.items() if name or (name == "" and role in NEEDED)}
    chosen = {role: asked_for(name, f"--{role}", columns, file) for role, name in named.items()}
    remarks = []
    for role, tiers in ROLES.items():
        if asked.get(role) is not None:
            continue
        found = matching((column for column in columns if column not in chosen.values()), tiers)
        if len(found) == 1:
            chosen[role] = found[0]
        elif role in NEEDED:
            raise DataError(_undecided(role, found, columns, file))
        elif found:
            remarks.append(f"no {role} is read: {' and '.join(found)} could both be it, name one by --{role}")
    _check_apart(chosen, file)
    return {role: chosen[role] for role in ROLES if role in chosen}, remarks


def _undecided(role: str, found: Collection[str], columns: Sequence[str], file: Path) -> str:
    if found:
        return f"{file}: which column is the {role}, {' or '.join(map(shown, found))}? Name it by --{role}"
    which = f"an {role}" if role == "item" else f"a {role}"
    return f"{file}: no column is named like {which}; name it by --{role}: the columns are {listed(columns)}"


def _check_apart(chosen: Mapping[str, str], file: Path) -> None:
    for column in chosen.values():
        twins = [other for other in chosen if chosen[other] == column]
        if len(twins) > 1:
            raise DataError(
                f"{file}: one column holds one thing, found {shown(column)} for {' and '.join(twins)}; "
                f"name another by --{twins[-1]}"
            )


def listed(columns: Sequence[str], most: int = 30) -> str:
    """The columns in one line; those of a very wide table in part."""
    rest = f" and {len(columns) - most} more" if len(columns) > most else ""
    return ", ".join(map(shown, columns[:most])) + rest


def shown(column: str) -> str:
    """The column's name on one line."""
    return column if column.isprintable() and column.strip() == column != "" else repr(column)
