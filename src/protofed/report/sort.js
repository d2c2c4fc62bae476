// Makes the columns of every table.sortable sortable by a click or by Enter / Space on the heading.
(function () {
  "use strict";

  function sortValue(row, column) {
    const cell = row.cells[column];
    const value = cell.dataset.value;
    if (value === undefined) return cell.textContent.trim().toLowerCase();
    return value === "" ? null : Number(value);
  }

  // Unknown values stay at the end whichever way the column is sorted.
  function compare(a, b, sign) {
    if (a === null || b === null) return (a === null) - (b === null);
    return sign * (a < b ? -1 : a > b ? 1 : 0);
  }

  function sortBy(table, heading, direction) {
    const column = Number(heading.dataset.column);
    const sign = direction === "ascending" ? 1 : -1;
    const body = table.tBodies[0];
    const rows = Array.from(body.rows, (row) => [sortValue(row, column), row]);
    rows.sort((x, y) => compare(x[0], y[0], sign));
    body.append(...rows.map((pair) => pair[1]));
    for (const other of table.querySelectorAll("th[aria-sort]")) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", direction);
  }

  function nextDirection(heading) {
    const now = heading.getAttribute("aria-sort");
    if (now) return now === "ascending" ? "descending" : "ascending";
    return heading.dataset.first || "descending";
  }

  for (const table of document.querySelectorAll("table.sortable")) {
    for (const heading of table.querySelectorAll("th[data-column]")) {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...heading.childNodes);
      heading.append(button);
      button.addEventListener("click", () => sortBy(table, heading, nextDirection(heading)));
    }
  }
})();
