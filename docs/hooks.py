"""Pages that are generated from the code when the site is built; see `hooks` in mkdocs.yml."""

import dataclasses


def on_page_markdown(markdown: str, **kwargs: object) -> str:
    if "<!-- generated:" not in markdown:
        return markdown
    return markdown.replace("<!-- generated: configuration -->", _fields()).replace(
        "<!-- generated: refused -->", _refused()
    )


def _fields() -> str:
    from trl_gtr.config import GTRConfig, refused_fields

    rows = ["| field | default | what it does |", "|---|---|---|"]
    for field in dataclasses.fields(GTRConfig):
        if field.name not in GTRConfig.__annotations__ or field.name in refused_fields():
            continue
        default = field.default_factory() if field.default is dataclasses.MISSING else field.default
        rows.append(f"| `{field.name}` | `{default!r}` | {_cell(field.metadata['help'])} |")
    return "\n".join(rows)


def _refused() -> str:
    from trl_gtr.config import refused_fields

    rows = ["| field | instead |", "|---|---|"]
    return "\n".join(rows + [f"| `{name}` | {_cell(instead)} |" for name, instead in refused_fields().items()])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
