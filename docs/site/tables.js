// Tables of 15 rows or more: a field that keeps the rows containing all its words, and headings that sort. Verdicts get a colour.
for (const table of document.querySelectorAll("article table")) {
  const rows = Array.from(table.tBodies[0]?.rows ?? [])
  for (const row of rows)
    for (const cell of row.cells)
      if (/^(pass|right|refused|wrong|crashed)$/.test(cell.textContent)) cell.classList.add("verdict", cell.textContent)
  if (rows.length < 15 || !table.tHead) continue

  const field = document.createElement("input")
  Object.assign(field, { type: "search", className: "filter", placeholder: "Search this table", ariaLabel: "Search this table" })
  const count = document.createElement("span")
  count.className = "filter-count"
  const show = () => {
    const words = field.value.toLowerCase().split(/\s+/)
    for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word))
    count.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length}`
  }
  field.addEventListener("input", show)
  const bar = document.createElement("div")
  bar.className = "filter-bar"
  bar.append(field, count)
  table.before(bar)
  show()

  for (const [column, heading] of Array.from(table.tHead.rows[0].cells).entries()) {
    heading.tabIndex = 0
    heading.classList.add("sortable")
    const sort = () => {
      const descending = heading.ariaSort === "ascending"
      for (const other of table.tHead.rows[0].cells) other.ariaSort = null
      heading.ariaSort = descending ? "descending" : "ascending"
      const text = (row) => row.cells[column].textContent.replaceAll(",", "")
      rows.sort((a, b) => text(a).localeCompare(text(b), "en", { numeric: true }) * (descending ? -1 : 1))
      table.tBodies[0].append(...rows)
    }
    heading.addEventListener("click", sort)
    heading.addEventListener("keydown", (event) => event.key === "Enter" && sort())
  }
}
